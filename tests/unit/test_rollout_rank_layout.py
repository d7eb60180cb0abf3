"""Parts that tensor-parallel ranks hold, against a reference that fuses whole tensors by hand and cuts the rank's piece."""

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from references.fused_reference import fused_fp8

from e2e_fp8.errors import ByteMismatchError, LayoutError
from e2e_fp8.numerics.digest import tensor_digests
from e2e_fp8.rollout.engine_layout import engine_layout
from e2e_fp8.rollout.rank_layout import rank_layout
from e2e_fp8.sync.engine_receipt import PartTable, RankReceipts, check_ranks, decode_digests, encode_digests, seal


def config_of(model_type: str, *, groups: int, per_group: int, tiles: int, experts: int, vocab: int, hidden_tiles: int, head_tiles: int):
    return {
        "model_type": model_type,
        "hidden_size": 128 * hidden_tiles,
        "head_dim": 128 * head_tiles,
        "num_attention_heads": groups * per_group,
        "num_key_value_heads": groups,
        "intermediate_size": 128 * tiles,
        "moe_intermediate_size": 128 * tiles,
        "num_experts": experts,
        "num_hidden_layers": 1,
        "vocab_size": vocab,
        "quantization_config": {"modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"]},
    }


@st.composite
def cases(draw):
    size = draw(st.sampled_from([1, 2, 4]))
    groups = draw(st.sampled_from([1, 2, 4]))
    per_group = draw(st.sampled_from([size // min(size, groups), 2 * size // min(size, groups)]))
    config = config_of(
        draw(st.sampled_from(["qwen3", "qwen3_moe"])),
        groups=groups,
        per_group=per_group,
        tiles=size * draw(st.integers(1, 2)),
        experts=draw(st.integers(1, 3)),
        vocab=draw(st.integers(1, 300)),
        hidden_tiles=draw(st.integers(1, 2)),
        head_tiles=1,
    )
    return config, size


def random_tensors(config: dict, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for slot in engine_layout(config):
        raw = torch.randint(0, 256, (torch.Size(slot.shape).numel() * slot.dtype.itemsize,), generator=generator, dtype=torch.uint8)
        tensors[slot.name] = raw.view(slot.dtype).view(slot.shape)
    return tensors


def filled(config: dict, tensors: dict[str, torch.Tensor], rank: int, size: int) -> dict[str, torch.Tensor]:
    """Parameters of a rank, allocated by the reference's shapes where it knows them, and written through the layout."""
    slots = rank_layout(config, rank, size)
    parameters = {name: torch.zeros_like(t) for name, t in fused_fp8(config, tensors, rank, size).items()}
    for slot in slots:
        if slot.slot.fp8:
            name = slot.slot.parameter
            parameters[name] = parameters[name].view(slot.slot.dtype)
        else:
            parameters[slot.slot.parameter] = torch.zeros(slot.slot.shape, dtype=slot.slot.dtype)
    for slot in slots:
        raw = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[slot.slot.dtype.itemsize]
        slot.live(parameters).view(raw).copy_(slot.part.of(tensors[slot.part.name]).view(raw))
    return parameters


def sealed(tables, reported) -> list[dict[str, str]]:
    """What ranks answer when their digests are asked for in one."""
    return [{"table": table.digest, "seal": seal(digests)} for table, digests in zip(tables, reported, strict=True)]


def check_prepared(tensors, tables, reported, proof) -> None:
    """The prepared comparison says what the plain one says, and refuses one changed bit and one missing part."""
    prepared = RankReceipts(tensors, tables)
    expected = prepared.expected(tensors)
    assert prepared.check(tensors, expected, reported, policy_version=1) == proof
    assert all((prepared.expected(tensors, kept=True) == expected).all() for _ in range(2))
    at = next(i for i, part in enumerate(tables[-1].parts) if part.name.endswith("down_proj.weight"))
    flipped = [*reported[:-1], reported[-1].copy()]
    flipped[-1][at] ^= 1
    assert prepared.agreed(expected, sealed(tables, reported)) == proof
    assert prepared.agreed(expected, sealed(tables, flipped)) is None
    with pytest.raises(ByteMismatchError, match=f"{tables[-1].parts[at].name} .bytes differ"):
        prepared.check(tensors, expected, flipped, policy_version=1)
    victim = tables[-1].parts[at]
    absent = [[p != victim for p in table.parts] for table in tables]
    cut = [PartTable(tuple(p for p in table.parts if p != victim)) for table in tables]
    fewer = RankReceipts(tensors, cut)
    shorter = [digests[keep] for digests, keep in zip(reported, absent, strict=True)]
    assert prepared.agreed(expected, sealed(cut, shorter)) is None
    assert fewer.agreed(fewer.expected(tensors), sealed(cut, shorter)) is None
    with pytest.raises(ByteMismatchError, match=f"{victim.name} .* elements are in the engine"):
        fewer.check(tensors, fewer.expected(tensors), shorter, policy_version=1)


@settings(deadline=None, max_examples=25)
@given(cases(), st.integers(0, 2**32))
def test_parts_fill_the_ranks_as_the_reference_does(case, seed):
    config, size = case
    tensors, ranks, tables, reported = random_tensors(config, seed), [], [], []
    for rank in range(size):
        parameters = filled(config, tensors, rank, size)
        for name, expected in fused_fp8(config, tensors, rank, size).items():
            assert torch.equal(parameters[name].view(torch.uint8), expected.view(torch.uint8)), (rank, name)
        slots = rank_layout(config, rank, size)
        digests = tensor_digests([slot.live(parameters) for slot in slots])
        tables.append(PartTable.from_json(PartTable(tuple(slot.part for slot in slots)).to_json()))
        reported.append(decode_digests(encode_digests(digests)))
        ranks.append(dict(zip(tables[-1].parts, reported[-1].tolist(), strict=True)))
        assert ranks[-1] == {slot.part: digest for slot, digest in zip(slots, digests, strict=True)}
    proof = check_ranks(tensors, ranks, policy_version=1)
    check_prepared(tensors, tables, reported, proof)
    victim = next(part for part in ranks[-1] if part.name.endswith("down_proj.weight"))
    with pytest.raises(ByteMismatchError, match=f"{victim.name} .bytes differ"):
        check_ranks(tensors, [*ranks[:-1], ranks[-1] | {victim: ranks[-1][victim] ^ 1}], policy_version=1)
    absent = [{part: digest for part, digest in rank.items() if part != victim} for rank in ranks]
    with pytest.raises(ByteMismatchError, match=f"{victim.name} .* elements are in the engine"):
        check_ranks(tensors, absent, policy_version=1)


@pytest.mark.parametrize(
    ("changes", "size", "message"),
    [
        ({"tiles": 6}, 4, r"w13_weight: vLLM refuses experts of 192 rows a rank \(not a multiple of 128\)"),
        ({"groups": 3, "per_group": 1}, 2, "Tensor size 2 neither divides nor is a multiple of the 3 key-value heads"),
        ({"tiles": 3, "groups": 1, "per_group": 2}, 2, "experts of 192 rows"),
    ],
)
def test_sizes_that_cut_heads_or_tiles_are_refused(changes, size, message):
    sizes = {"groups": 4, "per_group": 2, "tiles": 4, "experts": 2, "vocab": 100, "hidden_tiles": 1, "head_tiles": 1}
    with pytest.raises(LayoutError, match=message):
        rank_layout(config_of("qwen3_moe", **sizes | changes), 0, size)
