"""Receipts whose names are rectangles of engine parameters, checked against whole tensors of a checkpoint."""

import sys
from collections import Counter
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from random_models import hf_config, random_weights

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from references.fused_reference import fused_fp8

from e2e_fp8.cli import main as cli
from e2e_fp8.config.root import Config
from e2e_fp8.export.hf_checkpoint import write_hf_checkpoint
from e2e_fp8.layout.engine import scale_name
from e2e_fp8.orchestration.receipts import ReceiptLog, table_path
from e2e_fp8.orchestration.verify_pieces import cuts_exactly
from e2e_fp8.orchestration.weight_sync import SyncReport
from e2e_fp8.sync.point_to_point import transfer_plan
from e2e_fp8.sync.receipt import Manifest, manifest_of
from e2e_fp8.sync.reshard import piece_names
from e2e_fp8.types import ExportedTensor

NAME = "model.layers.1.mlp.experts.3.up_proj.weight"


def config(size: int, *, expert: bool = False, **model) -> Config:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "moe_intermediate_size": 256, "vocab_size": 64}
    return Config.model_validate(
        {
            "model": {"architecture": "qwen3_moe"} | sizes | model,
            "rollout": {"placement": "server", "tensor_parallel": size, "expert_parallel": expert},
            "sync": {"transport": "ranks"},
            "training": {"parallel": {"tensor": 2}},
            "run": {"backend": "cpu"},
        }
    )


def receipt_of(cfg: Config, weights: dict[str, torch.Tensor]) -> Manifest:
    """What the engine ranks reported: the plan's rectangles of the matrices that the slow reference fuses and cuts."""
    plan, pieces = transfer_plan(cfg, 2, "local"), []
    for rank in range(cfg.rollout.tensor_parallel):
        held = fused_fp8(hf_config(cfg), weights, rank, cfg.rollout.tensor_parallel, expert=cfg.rollout.expert_parallel)
        for copy in plan.copies(rank):
            if not copy.fp8:
                continue
            areas = [(copy.target, copy.target_row, copy.target_col, copy.rows, copy.cols), (scale_name(copy.target), *copy.tiles[2:])]
            for name, (parameter, row, col, rows, cols) in zip(piece_names(copy), areas, strict=True):
                whole = held[parameter] if copy.expert is None else held[parameter][copy.expert]
                dtype = torch.float32 if parameter.endswith("_scale_inv") else torch.float8_e4m3fn
                pieces.append(ExportedTensor(name=f"{name}@{rank}", tensor=whole.view(dtype)[row : row + rows, col : col + cols]))
    return Manifest.of_records(manifest_of(pieces, covered="all").tensors, covered="pieces")


def write_run(folder: Path, cfg: Config, receipt: Manifest) -> Path:
    (folder / "config.yaml").write_text(yaml.safe_dump(cfg.model_dump(mode="json")))
    log = ReceiptLog(folder)
    log.record(SyncReport(policy_version=7, num_bytes=9, seconds=0.5, receipt_seconds=0.1, receipt=receipt), 4)
    log.keep([4])
    return folder


def verify(run: Path, weights: dict[str, torch.Tensor], capsys) -> tuple[int, str]:
    folder = run / f"hf{len(list(run.glob('hf*')))}"
    # in whatever order: parts of a parameter need not follow each other
    names = [list(weights)[index] for index in torch.randperm(len(weights)).tolist()]
    write_hf_checkpoint(folder, (ExportedTensor(name=name, tensor=weights[name]) for name in names), {}, max_shard_bytes=1 << 18)
    code = cli.main(["receipt", "verify", str(run), "4", "--checkpoint", str(folder)])
    printed = capsys.readouterr()
    assert len(printed.err.splitlines()) == (code == 2)
    return code, printed.out + printed.err


@pytest.mark.parametrize(("size", "expert"), [(1, False), (2, False), (2, True)], ids=["tp1", "tp2", "tp2ep"])
def test_whole_tensors_are_cut_as_the_engine_ranks_hold_them(size, expert, tmp_path, capsys):
    cfg = config(size, expert=expert)
    weights = random_weights(cfg, int(torch.randint(1 << 30, ())))
    run = write_run(tmp_path, cfg, receipt_of(cfg, weights))
    code, text = verify(run, weights, capsys)
    assert code == 0, text
    high = sum(tensor.dtype == torch.bfloat16 for tensor in weights.values())
    assert f"covered: pieces, digest {receipt_of(cfg, weights).combined}\nequal\n{high} more tensors" in text
    flipped = weights[NAME].clone()
    flipped.view(torch.uint8)[77, 5] ^= 1
    code, text = verify(run, weights | {NAME: flipped}, capsys)
    rank, expert_index = divmod(3, cfg.model.num_experts // size) if expert else (0, 3)
    row = 77 + cfg.model.moe_intermediate_size // (1 if expert else size)
    assert (code, "DIFFERENT: 1 tensors" in text) == (1, True)
    (line,) = [line for line in text.splitlines() if "bytes differ" in line]
    name, _, place = line.strip().partition("w13_weight")
    assert name == "model.layers.1.mlp.experts.routed_experts."
    assert place.startswith(f"[{expert_index}][")
    first, last = map(int, place.split("[")[2].split(",")[0].split(":"))
    assert first <= row < last
    assert place.partition("]@")[2].partition(":")[0] == str(rank)


def test_a_missing_or_reshaped_tensor_is_named_by_its_pieces(tmp_path, capsys):
    cfg = config(2)
    weights = random_weights(cfg, 5)
    run = write_run(tmp_path, cfg, receipt_of(cfg, weights))
    for changed in ({}, {NAME: weights[NAME][:128].clone()}, {NAME: weights[NAME].view(-1).clone()}, {NAME: weights[NAME].float()}):
        code, text = verify(run, {n: t for n, t in weights.items() if n != NAME} | changed, capsys)
        assert code == 1
        missing = [line.strip() for line in text.splitlines() if line.endswith(": missing")]
        # the whole stack of experts of that layer, at both ranks, waits for the part
        assert missing
        assert all(line.startswith("model.layers.1.mlp.experts.routed_experts.w13_weight[") for line in missing)


def test_what_cannot_be_compared_is_one_sentence(tmp_path, capsys):
    cfg = config(2)
    weights = random_weights(cfg, 6)
    receipt = receipt_of(cfg, weights)
    run = write_run(tmp_path, cfg, receipt)
    other = cfg.model_copy(update={"rollout": cfg.rollout.model_copy(update={"tensor_parallel": 1})})
    (run / "config.yaml").write_text(yaml.safe_dump(other.model_dump(mode="json")))
    code, text = verify(run, weights, capsys)
    assert (code, "config.yaml is not that run's" in text) == (2, True)
    halved = dict(list(receipt.tensors.items())[::2])
    (tmp_path / "halved").mkdir()
    code, text = verify(write_run(tmp_path / "halved", cfg, Manifest.of_records(halved, covered="pieces")), weights, capsys)
    assert (code, "The receipt's pieces do not make up" in text) == (2, True)
    (run / "config.yaml").write_text(yaml.safe_dump(cfg.model_dump(mode="json")))
    table_path(run, 4, 0).unlink()
    code, text = verify(run, weights, capsys)
    assert (code, "the run kept no table of that step" in text) == (2, True)


def test_pieces_that_overlap_are_not_all_elements(tmp_path, capsys):
    """As many elements as the parameters have, true digests, and rows that no piece holds."""
    cfg = config(2)
    weights = random_weights(cfg, 7)
    receipt = receipt_of(cfg, weights)
    parameter = "model.layers.1.mlp.experts.routed_experts.w13_weight"
    name = f"{parameter}[0][0:128,0:256]@1"
    assert f"{parameter}[0][128:256,0:256]@1" in receipt.tensors
    held = fused_fp8(hf_config(cfg), weights, 1, 2)[parameter][0].view(torch.float8_e4m3fn)
    moved = ExportedTensor(name=f"{parameter}[0][64:192,0:256]@1", tensor=held[64:192])
    records = {n: record for n, record in receipt.tensors.items() if n != name} | manifest_of([moved], covered="all").tensors
    assert sum(record.num_bytes for record in records.values()) == receipt.num_bytes
    code, text = verify(write_run(tmp_path, cfg, Manifest.of_records(records, covered="pieces")), weights, capsys)
    assert (code, f"1 parameters of the engine, ['{parameter}@1']" in text) == (2, True), text


@given(st.integers(1, 9), st.integers(1, 9), st.data())
def test_areas_cut_a_matrix_exactly_when_every_element_is_in_one(rows, cols, data):
    def span(size: int) -> st.SearchStrategy[range]:
        return (
            st.tuples(st.integers(0, size + 1), st.integers(0, size + 1))
            .map(sorted)
            .filter(lambda two: two[0] < two[1])
            .map(lambda t: range(*t))
        )

    if data.draw(st.booleans()):
        edges = [sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=3))}) for size in (rows, cols)]
        row_parts, col_parts = ([range(*pair) for pair in pairwise(one)] for one in edges)
        areas = data.draw(st.permutations(list(product(row_parts, col_parts))))
        areas = areas[: len(areas) - data.draw(st.integers(0, 1))]
    else:
        areas = data.draw(st.lists(st.tuples(span(rows), span(cols)), max_size=4))
    elements = Counter((row, col) for some_rows, some_cols in areas for row in some_rows for col in some_cols)
    assert cuts_exactly(areas, rows, cols) == (elements == Counter(product(range(rows), range(cols))))


def test_tiles_of_fused_matrices_are_in_no_checkpoint(tmp_path, capsys):
    """K and V of a 64-wide head share a tile at each rank."""
    cfg = config(2, head_dim=64)
    run = write_run(tmp_path, cfg, Manifest.of_records(receipt_of(config(1), random_weights(config(1), 3)).tensors, covered="pieces"))
    code, text = verify(run, random_weights(config(2), 3), capsys)
    assert (code, "FP8 tiles that no checkpoint holds, so there is nothing to compare" in text) == (2, True)
