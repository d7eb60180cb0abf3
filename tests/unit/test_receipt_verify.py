"""Receipts kept in a run folder, and checked offline through the command line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

from e2e_fp8.cli import main as cli
from e2e_fp8.config.root import Config
from e2e_fp8.export.hf_checkpoint import write_hf_checkpoint
from e2e_fp8.orchestration.receipts import ReceiptLog, table_path
from e2e_fp8.orchestration.weight_sync import SyncReport
from e2e_fp8.sync.receipt import Manifest, TensorRecord, manifest_of
from e2e_fp8.types import ExportedTensor


def weights(version: int) -> list[ExportedTensor]:
    generator = torch.Generator().manual_seed(version)
    codes = torch.randint(0, 256, (256, 128), generator=generator, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return [
        ExportedTensor(name="a.weight", tensor=codes),
        ExportedTensor(name="a.weight_scale_inv", tensor=torch.rand(2, 1, generator=generator)),
        ExportedTensor(name="norm.weight", tensor=torch.rand(4, generator=generator).bfloat16()),
    ]


def sync(version: int, covered="fp8") -> SyncReport:
    return SyncReport(
        policy_version=version, num_bytes=9, seconds=0.5, receipt_seconds=0.1, receipt=manifest_of(weights(version), covered=covered)
    )


@pytest.fixture
def run_dir(tmp_path) -> Path:
    """Syncs at steps 3 to 6, version = 10 x step; tables of 4 (which has a checkpoint) and 6 (the last)."""
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(Config().model_dump(mode="json")))
    log = ReceiptLog(tmp_path)
    for step in (3, 4, 5, 6):
        log.record(sync(10 * step), step)
        if step == 4:
            log.keep([4])
    log.keep([4])
    return tmp_path


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    write_hf_checkpoint(tmp_path / "hf", weights(60), {}, max_shard_bytes=1 << 14)
    return tmp_path / "hf"


def verify(run_dir: Path, step: int, checkpoint: Path, capsys) -> tuple[int, str]:
    code = cli.main(["receipt", "verify", str(run_dir), str(step), "--checkpoint", str(checkpoint)])
    printed = capsys.readouterr()
    assert len(printed.err.splitlines()) == (code == 2)
    return code, printed.out + printed.err


def flip_bit(folder: Path, name: str) -> None:
    """In the file that holds ``name``, in the middle of its bytes."""
    file = folder / json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][name]
    raw = bytearray(file.read_bytes())
    header_bytes = int.from_bytes(raw[:8], "little")
    first, last = json.loads(raw[8 : 8 + header_bytes])[name]["data_offsets"]
    raw[8 + header_bytes + (first + last) // 2] ^= 1
    file.write_bytes(raw)


def test_the_receipts_own_checkpoint_is_equal(run_dir, checkpoint, capsys):
    code, text = verify(run_dir, 6, checkpoint, capsys)
    assert code == 0
    assert "step 6, policy version 60, rank 0: 2 tensors, 32,776 bytes, covered: fp8" in text
    assert "\nequal\n1 more tensors" in text


@pytest.mark.parametrize("name", ["a.weight", "a.weight_scale_inv"])
def test_one_flipped_bit_is_named(run_dir, checkpoint, capsys, name):
    flip_bit(checkpoint, name)
    code, text = verify(run_dir, 6, checkpoint, capsys)
    assert code == 1
    assert f"DIFFERENT: 1 tensors\n  {name}: bytes differ\n" in text


def test_high_precision_tensors_count_only_where_they_are_covered(run_dir, checkpoint, capsys):
    flip_bit(checkpoint, "norm.weight")
    assert verify(run_dir, 6, checkpoint, capsys)[0] == 0
    log = ReceiptLog(run_dir)
    log.record(sync(60, covered="all"), 6)
    log.keep([])
    code, text = verify(run_dir, 6, checkpoint, capsys)
    assert code == 1
    assert "3 tensors, 32,784 bytes, covered: all" in text
    assert "norm.weight: bytes differ" in text


def test_missing_and_foreign_tensors_are_named(run_dir, checkpoint, capsys):
    save_file({"b.weight": torch.zeros(128, 128).to(torch.float8_e4m3fn)}, checkpoint / "more.safetensors")
    (checkpoint / json.loads((checkpoint / "model.safetensors.index.json").read_text())["weight_map"]["a.weight"]).unlink()
    code, text = verify(run_dir, 6, checkpoint, capsys)
    assert code == 1
    assert "  a.weight: missing\n" in text
    assert "  b.weight: unexpected\n" in text


def test_without_a_table_the_combined_digest_decides(run_dir, checkpoint, tmp_path, capsys):
    code, text = verify(run_dir, 5, checkpoint, capsys)
    assert code == 1
    assert "kept no table of that step" in text
    write_hf_checkpoint(tmp_path / "five", weights(50), {})
    assert verify(run_dir, 5, tmp_path / "five", capsys)[0] == 0


def test_tables_are_kept_for_checkpoints_and_the_last_sync(run_dir):
    def kept() -> list[int]:
        return [step for step in range(9) if table_path(run_dir, step, 0).exists()]

    assert kept() == [4, 6]
    log = ReceiptLog(run_dir)
    log.keep([])
    assert kept() == [4, 6], "a run that did not sync must not remove what an earlier session kept"
    log.rewind(4)
    assert kept() == [4]
    log.record(sync(50), 5)
    log.keep([5])
    assert kept() == [5]


def test_mistakes_are_one_sentence(run_dir, checkpoint, tmp_path, capsys):
    def refused(step: int, folder: Path) -> str:
        code, text = verify(run_dir, step, folder, capsys)
        assert code == 2
        return text

    assert "no receipt of step 7: there are receipts of steps 3-6." in refused(7, checkpoint)
    assert "holds no safetensors files" in refused(6, tmp_path / "nowhere")
    shard = next(checkpoint.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    assert f"{shard} is truncated or damaged" in refused(6, checkpoint)
    assert cli.main(["receipt", "verify", str(run_dir), "6"]) == 2
    assert "no checkpoint of step 6 to compare with (it has none)" in capsys.readouterr().err
    table = table_path(run_dir, 6, 0)
    table.write_text(table.read_text().replace("a.weight\t", "c.weight\t"))
    assert "is not the receipt that the run wrote" in refused(6, checkpoint)
    table.write_text(table_path(run_dir, 4, 0).read_text())
    assert "one of the two was altered" in refused(6, checkpoint)


def test_receipts_of_an_older_version_and_switched_off_ones_are_said(run_dir, checkpoint, capsys):
    off = SyncReport(policy_version=80, num_bytes=9, seconds=0.5, receipt_seconds=0.0, receipt=None)
    ReceiptLog(run_dir).record(off, 8)
    assert "no receipt of step 8: there are receipts of steps 3-6." in verify(run_dir, 8, checkpoint, capsys)[1]
    with open(run_dir / "receipts.jsonl", "a") as file:
        file.write(json.dumps({"step": 9, "policy_version": 9, "tensors": 2, "bytes": 3, "digest": "00", "passed": True}) + "\n")
    code, text = verify(run_dir, 9, checkpoint, capsys)
    assert code == 2
    assert "of an older version" in text
    pieces = Manifest.of_records({"a.weight[0:128,0:128]@1": TensorRecord("float8_e4m3fn", (128, 128), 1 << 14, 7)}, covered="pieces")
    ReceiptLog(run_dir).record(SyncReport(policy_version=10, num_bytes=9, seconds=0.5, receipt_seconds=0.1, receipt=pieces), 10)
    code, text = verify(run_dir, 10, checkpoint, capsys)
    assert code == 2
    assert "receipt of step 10" in text
    assert "sync.transport=ranks" in text


def test_verifying_imports_neither_engine(run_dir, checkpoint):
    script = f"""
import sys
from e2e_fp8.cli.main import main
assert main(["receipt", "verify", {str(run_dir)!r}, "6", "--checkpoint", {str(checkpoint)!r}]) == 0
assert not {{name.partition(".")[0] for name in sys.modules}} & {{"vllm", "megatron", "transformer_engine", "triton"}}
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
