"""The receipt must fail on any changed byte and name the tensor."""

import subprocess

import pytest
import torch

from e2e_fp8.errors import ByteMismatchError
from e2e_fp8.sync.receipt import ManifestSeries, check_receipt, manifest_of, parse_table, receipt_record, render_table
from e2e_fp8.types import ExportedTensor


def tensors(seed: int = 0) -> list[ExportedTensor]:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (256, 128), generator=generator, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return [
        ExportedTensor(name="a.weight", tensor=codes),
        ExportedTensor(name="a.weight_scale_inv", tensor=torch.rand(2, 1, generator=generator)),
        ExportedTensor(name="norm.weight", tensor=torch.ones(4, dtype=torch.bfloat16)),
    ]


def test_equal_bytes_pass_and_coverage_decides_about_high_precision():
    manifest = manifest_of(tensors())
    check_receipt(manifest, manifest_of(tensors()), policy_version=1)
    assert set(manifest.digests) == {"a.weight", "a.weight_scale_inv"}
    assert manifest.num_bytes == 256 * 128 + 8
    whole = manifest_of(tensors(), covered="all")
    assert set(whole.digests) == {"a.weight", "a.weight_scale_inv", "norm.weight"}
    changed = [*tensors()[:2], ExportedTensor(name="norm.weight", tensor=torch.ones(4, dtype=torch.bfloat16).neg())]
    check_receipt(manifest, manifest_of(changed), policy_version=1)
    with pytest.raises(ByteMismatchError, match=r"1 of 3 .*norm\.weight \(bytes differ\)"):
        check_receipt(whole, manifest_of(changed, covered="all"), policy_version=1)


@pytest.mark.parametrize("row", [0, 1])
def test_one_flipped_bit_is_named(row):
    changed = tensors()
    raw = changed[0].tensor.view(torch.uint8).clone()
    raw[row * 255, 127] ^= 1
    changed[0] = ExportedTensor(name="a.weight", tensor=raw.view(torch.float8_e4m3fn))
    with pytest.raises(ByteMismatchError, match=r"policy version 7, 1 of 2 .*a\.weight \(bytes differ\)"):
        check_receipt(manifest_of(tensors()), manifest_of(changed), policy_version=7)


def test_scale_of_one_ulp_is_named():
    changed = tensors()
    scale_inv = changed[1].tensor.clone()
    scale_inv[1, 0] = torch.nextafter(scale_inv[1, 0], torch.tensor(2.0))
    changed[1] = ExportedTensor(name="a.weight_scale_inv", tensor=scale_inv)
    with pytest.raises(ByteMismatchError, match=r"a\.weight_scale_inv"):
        check_receipt(manifest_of(tensors()), manifest_of(changed), policy_version=1)


def test_missing_and_foreign_tensors_are_named():
    with pytest.raises(ByteMismatchError, match=r"a\.weight \(missing\)"):
        check_receipt(manifest_of(tensors()), manifest_of(tensors()[1:]), policy_version=1)
    with pytest.raises(ByteMismatchError, match=r"a\.weight \(unexpected\)"):
        check_receipt(manifest_of(tensors()[1:]), manifest_of(tensors()), policy_version=1)


def test_combined_digest_depends_on_every_tensor():
    assert manifest_of(tensors(0)).combined != manifest_of(tensors(1)).combined
    assert manifest_of(tensors(0)).combined == manifest_of(reversed(tensors(0))).combined


def test_equal_bytes_in_another_shape_or_dtype_are_named():
    codes = tensors()[0].tensor
    for other in (codes.view(128, 256), codes.view(torch.uint8)):
        changed = [ExportedTensor(name="a.weight", tensor=other), *tensors()[1:]]
        with pytest.raises(ByteMismatchError, match=r"a\.weight \(is "):
            check_receipt(manifest_of(tensors(), covered="all"), manifest_of(changed, covered="all"), policy_version=1)


def test_table_round_trips_and_a_stranger_can_recompute_its_digest(tmp_path):
    manifest = manifest_of([*tensors(), ExportedTensor(name="step", tensor=torch.tensor(3))], covered="all")
    record = receipt_record(manifest, policy_version=9, step=4)
    (tmp_path / "table.tsv").write_text(render_table(manifest, record))
    parsed, head = parse_table((tmp_path / "table.tsv").read_text())
    assert parsed == manifest
    assert {key: head[key] for key in record} == record
    assert (head["tensors"], head["bytes"], head["covered"], head["rank"], head["policy_version"]) == (4, 32792, "all", 0, 9)
    command = f"tail -n +2 {tmp_path}/table.tsv | b2sum -l 128"
    assert subprocess.run(command, shell=True, capture_output=True, text=True, check=True).stdout.split()[0] == manifest.combined


@pytest.mark.parametrize(
    "damage", [lambda t: t.replace("256x128", "128x256"), lambda t: t[:-2] + "\n", lambda t: "", lambda t: t.partition("\n")[2]]
)
def test_an_altered_table_is_refused(damage):
    manifest = manifest_of(tensors())
    with pytest.raises(ValueError):
        parse_table(damage(render_table(manifest, receipt_record(manifest, policy_version=1, step=1))))


@pytest.mark.parametrize("covered", ["fp8", "all"])
def test_a_series_of_receipts_reads_the_bytes_anew(covered):
    """In place, after a tensor has moved under the same tuple, for another tuple and for what is no tuple."""
    series, entries = ManifestSeries(), tuple(tensors())
    for seed in (0, 1, 2):
        for entry, wanted in zip(entries, tensors(seed), strict=True):
            entry.tensor.view(torch.uint8).copy_(wanted.tensor.view(torch.uint8))
        manifest = series.of(entries, covered=covered)
        assert manifest.lines() == manifest_of(tensors(seed), covered=covered).lines()
        assert manifest.same_tensors(manifest_of(reversed(tensors(seed)), covered=covered))
        assert not manifest.same_tensors(manifest_of(tensors(seed + 1), covered=covered))
        assert not manifest.same_tensors(manifest_of(tensors(seed)[1:], covered=covered))
    entries[1].tensor.data = tensors(5)[1].tensor
    assert series.of(entries, covered=covered).digests["a.weight_scale_inv"] == manifest_of(tensors(5)).digests["a.weight_scale_inv"]
    for other in (tuple(tensors(3)), tensors(4)):
        assert series.of(other, covered=covered).tensors == manifest_of(other, covered=covered).tensors
