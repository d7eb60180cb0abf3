"""Plans of random layouts, executed on arrays of distinct numbers, against a reference that gathers everything and slices."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from layout_cases import layouts, plan_of
from references import layout_reference as reference

from e2e_fp8.layout.plan import Plan
from e2e_fp8.layout.straddles import verdicts


def executed(plan: Plan, ranks: list[list[reference.Arrays]], rank: int, wanted: reference.Arrays) -> tuple[reference.Arrays, Counter]:
    """The engine rank's arrays after its copies, and how often elements of each parameter were written."""
    built = {name: np.full(array.shape, -1) for name, array in wanted.items()}
    written = {name: np.zeros(array.shape, int) for name, array in wanted.items()}
    for copy in plan.copies(rank):
        source = ranks[copy.source_rank][copy.chunk][copy.source]
        source = source.reshape(source.shape[0], -1)[
            copy.source_row : copy.source_row + copy.rows, copy.source_col : copy.source_col + copy.cols
        ]
        assert source.shape == (copy.rows, copy.cols), copy
        for arrays, value in ((built, source), (written, None)):
            target = arrays[copy.target] if copy.expert is None else arrays[copy.target][copy.expert]
            view = target.reshape(target.shape[0], -1)[
                copy.target_row : copy.target_row + copy.rows, copy.target_col : copy.target_col + copy.cols
            ]
            view[:] = view + 1 if value is None else value
    for fill in plan.fills(rank):
        written[fill.target][fill.row : fill.row + fill.rows] += 1
    return built, Counter(int(n) for counts in written.values() for n in np.unique(counts))


def engine_scales(
    plan: Plan, ranks: list[list[reference.Arrays]], rank: int, wanted: reference.Arrays, refused: set[str]
) -> reference.Arrays:
    """Tile numbers that arrive beside each FP8 parameter, moved tile by tile as the copies say."""
    grids = {
        name: np.full((*array.shape[:-2], *(-(-n // reference.EDGE) for n in array.shape[-2:])), -1)
        for name, array in wanted.items()
        if array.ndim > 1 and reference.is_fp8(name) and name not in refused
    }
    for copy in plan.copies(rank):
        if copy.target in grids:
            source = reference.tile_numbers(ranks[copy.source_rank][copy.chunk][copy.source])[:: reference.EDGE, :: reference.EDGE]
            row, col, target_row, target_col, rows, cols = copy.tiles
            target = grids[copy.target] if copy.expert is None else grids[copy.target][copy.expert]
            target[target_row : target_row + rows, target_col : target_col + cols] = source[row : row + rows, col : col + cols]
    return grids


def spread(grid: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Tile numbers repeated over the elements they belong to."""
    wide = grid.repeat(reference.EDGE, -2).repeat(reference.EDGE, -1)
    return wide[..., : shape[-2], : shape[-1]]


def one_per_tile(numbers: np.ndarray) -> bool:
    """Whether every tile of the (stacked) matrix holds a single number."""
    matrices = numbers.reshape(-1, *numbers.shape[-2:])
    return all((reference.tile_numbers(m) == m).all() for m in matrices)


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(layouts())
def test_a_plan_delivers_what_gathering_and_slicing_gives(case):
    config, sizes = case
    plan, hf = plan_of(config, sizes), reference.checkpoint(config)
    elements = sum(array.size for array in hf.values())
    ranks = reference.trainer_ranks(config, hf, sizes)
    trained = reference.scale_numbers((model for chunks in ranks for model in chunks), elements)
    in_checkpoint = reference.scale_numbers([hf], elements)
    found = {(layer, one.parameter): one for one in verdicts(plan) for layer in one.layers}
    whole, as_checkpoint = dict.fromkeys(found, True), dict.fromkeys(found, True)
    for rank in range(plan.rollout.world_size):
        wanted = reference.engine_rank(config, hf, sizes, rank)
        built, written = executed(plan, ranks, rank, wanted)
        assert set(written) == {1}
        for name, array in wanted.items():
            np.testing.assert_array_equal(built[name], array, err_msg=name)
        refused = {f"model.layers.{layer}.{name}" for (layer, name), one in found.items() if one.cuts}
        for name, grid in engine_scales(plan, ranks, rank, wanted, refused).items():
            np.testing.assert_array_equal(spread(grid, wanted[name].shape), trained[wanted[name]], err_msg=name)
        for layer, name in found:
            elements_of = wanted[f"model.layers.{layer}.{name}"]
            whole[layer, name] &= one_per_tile(trained[elements_of])
            as_checkpoint[layer, name] &= one_per_tile(in_checkpoint[elements_of])
    for key, one in found.items():
        # the analysis cuts exactly where an engine tile meets two of the trainer's, and says native exactly for foreign tiles
        assert bool(one.cuts) == (not whole[key]), (key, one)
        assert bool(one.checkpoint_cuts) == (not as_checkpoint[key]), (key, one)


@pytest.mark.parametrize("half", ["source", "target"])
def test_copies_of_one_pair_are_those_of_the_whole_plan(half):
    config = {"model_type": "qwen3_moe", "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config |= {"head_dim": 128, "intermediate_size": 128, "vocab_size": 64, "num_experts": 4, "moe_intermediate_size": 128}
    plan = plan_of(config, reference.Sizes(tp=2, pp=2, ep=2, etp=1, rollout_tp=2, rollout_ep=True))
    whole = [copy for rank in range(2) for copy in plan.copies(rank)]
    pairs = [copy for rank in range(2) for source in range(4) for copy in plan.copies(rank, source_rank=source)]
    assert sorted(whole, key=repr) == sorted(pairs, key=repr)
    assert {getattr(copy, f"{half}_rank") for copy in whole} == set(range(4 if half == "source" else 2))
    totals = plan.totals()
    assert totals["copies"] == len(whole)
    assert totals["bytes"] == sum(copy.nbytes for copy in whole)
