"""Messages between ranks: nothing lost, nothing twice, none larger than allowed, and an order in which no rank waits in a circle."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_cases import layouts, plan_of

from e2e_fp8.errors import LayoutError
from e2e_fp8.layout.straddles import verdicts
from e2e_fp8.layout.tiles import touched
from e2e_fp8.sync.point_to_point import messages, partners


def rows_of(copies) -> list[tuple]:
    """Every row that is moved, from where to where."""
    return sorted(
        (one.target, one.expert or 0, one.target_row + i, one.target_col, one.cols, one.source_rank, one.source, one.source_row + i)
        for one in copies
        for i in range(one.rows)
    )


@settings(max_examples=40, deadline=None)
@given(layouts(), st.integers(0, 200_000))
def test_messages_hold_each_row_once_and_are_bounded(case, more):
    plan = plan_of(*case)
    copies = list(plan.copies(0))
    max_bytes = max(one._replace(target_row=0, rows=128 if one.fp8 else 1).nbytes for one in copies) + 512 + more
    packed = list(messages(copies, max_bytes))
    parts = [copy for message in packed for copy in message.copies]
    assert all(0 < message.extent <= max_bytes for message in packed)
    assert rows_of(parts) == rows_of(copies)
    if all(one.verdict != "refuse" for one in verdicts(plan)):
        for part in parts:
            if part.fp8:
                assert part.tiles[4:] == (touched(part.source_row, part.rows), touched(part.source_col, part.cols))


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


def test_a_bound_below_one_row_of_tiles_is_refused():
    from e2e_fp8.layout import EngineParallel, MegatronParallel
    from e2e_fp8.layout.plan import Plan

    config = {"model_type": "qwen3", "hidden_size": 512, "num_hidden_layers": 1, "vocab_size": 64, "intermediate_size": 512}
    plan = Plan.from_config(config | {"num_attention_heads": 4, "num_key_value_heads": 4}, MegatronParallel(), EngineParallel())
    with pytest.raises(LayoutError, match=r"Messages of 65536 bytes do not hold 128 rows of .*qkv_proj.weight \(65552 bytes\)"):
        list(messages(plan.copies(0), 64 << 10))
