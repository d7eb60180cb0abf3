"""Messages between ranks: nothing lost, nothing twice, none larger than allowed, and an order in which no rank waits in a circle."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_cases import layouts, plan_of

from e2e_fp8.errors import LayoutError
from e2e_fp8.layout.straddles import verdicts
from e2e_fp8.sync.point_to_point import messages, partners


def cells(copy) -> set[tuple]:
    """Every 32x32 square of a copy (or a row and 32 columns of it), with where it comes from."""
    rows, cols = (1 if copy.rows % 32 else 32), 32
    return {
        (copy.source, copy.source_row + r, copy.source_col + c, copy.target, copy.expert, copy.target_row + r, copy.target_col + c)
        for r in range(0, copy.rows, rows)
        for c in range(0, copy.cols, cols)
    }


@settings(max_examples=60, deadline=None)
@given(layouts(), st.sampled_from([34 << 10, 50 << 10, 1 << 20, 1 << 30]))
def test_messages_hold_each_piece_once_in_order_and_are_bounded(case, max_bytes):
    plan = plan_of(*case)
    copies = list(plan.copies(0))
    try:
        packed = list(messages(copies, max_bytes))
    except LayoutError as error:
        widest = max(copy.cols for copy in copies)
        assert "do not hold" in str(error)
        assert 128 * widest + 1024 > max_bytes or 2 * widest > max_bytes - 512
        return
    parts = [copy for message in packed for copy in message.copies]
    assert all(0 < message.extent <= max_bytes for message in packed)
    assert sum(part.rows * part.cols for part in parts) == sum(copy.rows * copy.cols for copy in copies)
    whole, small = ([cells(copy) for copy in side] for side in (copies, parts))
    if not any(copy.rows % 32 for copy in (*copies, *parts)):
        assert set().union(*whole) == set().union(*small)
    if all(one.verdict != "refuse" for one in verdicts(plan)):
        for part in parts:
            if part.fp8:
                source, target = (part.source_row, part.source_col), (part.target_row, part.target_col)
                touched = [-(-(at % 128 + size) // 128) for at, size in zip(source, (part.rows, part.cols), strict=True)]
                assert touched == list(part.tiles[4:]), (part, source, target)


@given(st.integers(1, 12), st.integers(1, 12))
def test_every_pair_meets_once_and_no_rank_waits_in_a_circle(trainers, engines):
    sends = {s: partners(s, engines, trainers) for s in range(trainers)}
    receives = {t: partners(t, trainers, engines, backwards=True) for t in range(engines)}
    assert all(sorted(met) == list(range(engines)) for met in sends.values())
    assert all(sorted(met) == list(range(trainers)) for met in receives.values())
    rounds = 0
    while any(sends.values()):
        ready = [(s, met[0]) for s, met in sends.items() if met and receives[met[0]][0] == s]
        assert ready, "every rank waits for another"
        for source, target in ready:
            sends[source].pop(0)
            receives[target].pop(0)
        rounds += 1
    assert rounds <= max(trainers, engines)


def test_a_bound_below_one_row_of_tiles_is_refused(tmp_path):
    from e2e_fp8.layout import EngineParallel, MegatronParallel
    from e2e_fp8.layout.plan import Plan

    config = {"model_type": "qwen3", "hidden_size": 512, "num_hidden_layers": 1, "vocab_size": 64, "intermediate_size": 512}
    plan = Plan.from_config(config | {"num_attention_heads": 4, "num_key_value_heads": 4}, MegatronParallel(), EngineParallel())
    with pytest.raises(LayoutError, match=r"Messages of 65536 bytes do not hold 128 rows of .*qkv_proj.weight \(65552 bytes\)"):
        list(messages(plan.copies(0), 64 << 10))
