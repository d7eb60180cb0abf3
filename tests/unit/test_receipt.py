"""The receipt must fail on any changed byte and name the tensor."""

import pytest
import torch

from e2e_fp8.errors import ByteMismatchError
from e2e_fp8.sync.receipt import check_receipt, manifest_of
from e2e_fp8.types import ExportedTensor


def tensors(seed: int = 0) -> list[ExportedTensor]:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (256, 128), generator=generator, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return [
        ExportedTensor(name="a.weight", tensor=codes),
        ExportedTensor(name="a.weight_scale_inv", tensor=torch.rand(2, 1, generator=generator)),
        ExportedTensor(name="norm.weight", tensor=torch.ones(4, dtype=torch.bfloat16)),
    ]


def test_equal_bytes_pass_and_high_precision_is_not_receipted():
    manifest = manifest_of(tensors())
    check_receipt(manifest, manifest_of(tensors()), policy_version=1)
    assert set(manifest.digests) == {"a.weight", "a.weight_scale_inv"}
    assert manifest.num_bytes == 256 * 128 + 8


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
    with pytest.raises(ByteMismatchError, match="missing in the engine"):
        check_receipt(manifest_of(tensors()), manifest_of(tensors()[1:]), policy_version=1)
    with pytest.raises(ByteMismatchError, match="not from the trainer"):
        check_receipt(manifest_of(tensors()[1:]), manifest_of(tensors()), policy_version=1)


def test_combined_digest_depends_on_every_tensor():
    assert manifest_of(tensors(0)).combined != manifest_of(tensors(1)).combined
    assert manifest_of(tensors(0)).combined == manifest_of(reversed(tensors(0))).combined
