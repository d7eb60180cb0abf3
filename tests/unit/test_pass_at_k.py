"""pass@k: equal to enumeration, unbiased, and refused where it means nothing."""

from itertools import product
from statistics import fmean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st
from references.pass_at_k_reference import pass_at_k_by_enumeration

from e2e_fp8.observability.names import METRICS
from e2e_fp8.tasks.pass_at_k import held_out_record, mean_pass_at_k, pass_at_k


@given(st.lists(st.booleans(), min_size=1, max_size=10), st.data())
def test_equals_enumeration_of_all_subsets(passes: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(passes)))
    assert pass_at_k(len(passes), sum(passes), k) == float(pass_at_k_by_enumeration(passes, k))


@pytest.mark.parametrize("chance", [0.0, 0.15, 0.5, 1.0])
def test_is_unbiased_and_the_plug_in_estimate_is_not(chance: float) -> None:
    n, k = 6, 3
    outcomes = [(bits, chance ** sum(bits) * (1 - chance) ** (n - sum(bits))) for bits in product((0, 1), repeat=n)]
    truth = 1 - (1 - chance) ** k
    assert sum(weight * pass_at_k(n, sum(bits), k) for bits, weight in outcomes) == pytest.approx(truth, abs=1e-12)
    plug_in = sum(weight * (1 - (1 - sum(bits) / n) ** k) for bits, weight in outcomes)
    assert (abs(plug_in - truth) > 1e-3) == (0 < chance < 1)


def test_large_counts_do_not_overflow_and_the_mean_is_over_prompts() -> None:
    assert 0.0 < pass_at_k(20_000, 1, 10_000) == 0.5
    assert mean_pass_at_k([[True, False], [False, False], [True, True]], 1) == pytest.approx(0.5)
    assert mean_pass_at_k([[True, False], [False, False], [True, True]], 2) == pytest.approx(2 / 3)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 5), (4, 5, 1), (4, -1, 1), (4, 1, 0)])
def test_what_has_no_estimate_is_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="pass@k needs"):
        pass_at_k(n, c, k)


@given(st.integers(1, 5), st.lists(st.floats(0, 1), min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_a_record_has_the_mean_its_error_over_prompts_and_every_k_that_the_samples_allow(samples, levels, draw) -> None:
    rewards = [draw.choice([level, 1.0]) for level in levels for _ in range(samples)]
    record = held_out_record(rewards, samples, 1.0)
    groups = [rewards[i * samples : (i + 1) * samples] for i in range(len(levels))]
    assert record["reward/held_out"] == pytest.approx(fmean(rewards))
    if len(groups) > 1:
        expected = stdev(fmean(group) for group in groups) / len(groups) ** 0.5
        assert record["reward/held_out_stderr"] == pytest.approx(expected, abs=1e-9)
    assert ("reward/held_out_stderr" in record) == (len(groups) > 1)
    ks = [k for k in (1, 2, 4) if k <= samples]
    assert [name for name in record if name.startswith("pass_at_k/")] == [f"pass_at_k/{k}" for k in ks]
    for k in ks:
        by_hand = fmean(float(pass_at_k_by_enumeration([r >= 1.0 for r in group], k)) for group in groups)
        assert record[f"pass_at_k/{k}"] == pytest.approx(by_hand)
    assert record.keys() <= METRICS.keys()
