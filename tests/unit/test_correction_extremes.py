"""Importance weights and mismatch metrics where the two policies are far apart, by hand and exact at the bounds."""

import math
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from e2e_fp8.correction.diagnostics import mismatch_metrics
from e2e_fp8.correction.importance import safe_log_ratio

sys.path.insert(0, str(Path(__file__).parent))
from correction_cases import token_truncated_weights

INF, NAN = math.inf, math.nan


def metrics(train: list[float], rollout: list[float], mask: list[float], cu_seqlens: list[int], threshold: float = 2.0) -> dict[str, float]:
    as_double = [torch.tensor(x, dtype=torch.float64) for x in (train, rollout)]
    return mismatch_metrics(*as_double, torch.tensor(mask), torch.tensor(cu_seqlens, dtype=torch.int32), threshold)


def test_metrics_by_hand():
    result = metrics([-1.0, -2.0, NAN, -3.0], [-1.0, -2.5, NAN, -3.0], [1.0, 1.0, 0.0, 1.0], [0, 3, 4])
    assert result["rollout_corr/kl"] == pytest.approx(-0.5 / 3)
    assert result["mismatch_kl"] == result["rollout_corr/k3_kl"] == pytest.approx((math.exp(0.5) - 1.5) / 3)
    assert result["rollout_corr/log_ppl_diff"] == pytest.approx(-0.25 / 2)
    assert result["rollout_corr/log_ppl_diff_min"] == pytest.approx(-0.25)
    assert result["rollout_corr/chi2_token"] == pytest.approx((math.e + 2) / 3 - 1)
    assert result["rollout_corr/chi2_seq"] == pytest.approx((math.e + 1) / 2 - 1)
    assert result["rollout_corr/training_ppl"] == pytest.approx((math.exp(1.5) + math.exp(3)) / 2)
    gap = math.exp(-2.0) - math.exp(-2.5)
    assert result["training/rollout_probs_diff_std"] == pytest.approx(gap / math.sqrt(3))


def test_sequences_weigh_equally_whatever_their_length():
    result = metrics([-1.0] * 9 + [-3.0], [-1.0] * 10, [1.0] * 10, [0, 9, 10])
    assert result["rollout_corr/log_ppl_diff"] == 1.0
    assert result["rollout_corr/kl"] == pytest.approx(0.2)


def test_a_sequence_with_nothing_trained_does_not_dilute():
    whole = metrics([-1.0, -2.0], [-1.5, -2.5], [1.0, 1.0], [0, 2])
    assert metrics([-1.0, -2.0, NAN, NAN], [-1.5, -2.5, NAN, NAN], [1.0, 1.0, 0.0, 0.0], [0, 2, 4]) == whole


def test_a_broken_token_shows_at_its_full_size_while_weights_stay_clamped():
    result = metrics([-500.0, -1.0], [-1.0, -1.0], [1.0, 1.0], [0, 2])
    assert result["train_rollout_logprob_abs_diff/max"] == 499.0
    assert result["rollout_corr/kl"] == 249.5
    assert result["rollout_corr/rollout_is_min"] == math.exp(-20)
    # std and effective sample size see the weight within [1/2, 2]
    assert result["rollout_corr/rollout_is_std"] == 0.25
    assert result["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(0.75**2 / 0.625)


@pytest.mark.parametrize(
    ("train", "rollout", "kl", "weight"), [(-INF, -1.0, INF, math.exp(-20)), (-1.0, -INF, -INF, math.exp(20)), (-INF, -INF, 0.0, 1.0)]
)
def test_infinite_log_probs(train, rollout, kl, weight):
    result = metrics([train, -1.0], [rollout, -1.0], [1.0, 1.0], [0, 2])
    assert result["rollout_corr/kl"] == kl
    assert result["mismatch_kl"] == abs(kl)
    extreme = result["rollout_corr/rollout_is_max" if weight > 1 else "rollout_corr/rollout_is_min"]
    assert extreme == pytest.approx(weight, rel=1e-15)
    assert math.isfinite(result["rollout_corr/chi2_token"])
    assert math.isfinite(result["rollout_corr/chi2_seq"])
    assert 0 < result["rollout_corr/rollout_is_eff_sample_size"] <= 1


def test_k3_keeps_its_digits_at_the_size_of_rounding_noise():
    rollout = torch.full((1000,), -1.0)
    train = rollout + 2.0**-24
    result = mismatch_metrics(train, rollout, torch.ones(1000), torch.tensor([0, 1000]))
    # exp(d) - d - 1 would keep one digit of d^2 / 2
    assert result["mismatch_kl"] == pytest.approx(2.0**-49, rel=1e-6)


def test_truncation_is_exact_at_the_bound():
    old = torch.tensor([0.0, -1e-3, 5.0, -5.0, INF, 0.0])
    result = token_truncated_weights(old, torch.zeros(6), torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 0.0]), 1.0)
    assert result.weights.tolist() == pytest.approx([1.0, math.exp(-1e-3), 1.0, math.exp(-5), 1.0, 1.0])
    assert result.weights[[0, 2, 4, 5]].tolist() == [1.0] * 4
    assert result.out_of_bounds.tolist() == [0.0, 0.0, 1.0, 0.0, 1.0, 0.0]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.floats(-60, 0, width=32), st.floats(-60, 0, width=32), st.booleans()), min_size=1, max_size=20),
    st.sampled_from([0.25, 1.0, 2.0, 5.0]),
)
def test_float32_weights_never_pass_the_bound_and_are_one_outside_the_mask(tokens, threshold):
    old, rollout, mask = (torch.tensor(x, dtype=torch.float32) for x in zip(*tokens, strict=True))
    result = token_truncated_weights(old.requires_grad_(), rollout, mask, threshold)
    trained = mask > 0
    assert result.weights.dtype == result.out_of_bounds.dtype == torch.float32
    assert bool((result.weights[trained] <= threshold).all())
    assert bool((result.weights[~trained] == 1).all())
    assert torch.equal(result.weights[result.out_of_bounds > 0], torch.full_like(result.weights[result.out_of_bounds > 0], threshold))
    assert not result.weights.requires_grad


def test_log_ratio_keeps_its_gradient_on_policy_and_loses_it_beyond_the_clamp():
    values = torch.tensor([-1.0, -50.0, NAN, -INF, -3.0], requires_grad=True)
    ratio = safe_log_ratio(values, torch.tensor([-1.0, -1.0, -1.0, -INF, -2.0]), torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0]))
    assert ratio.tolist() == [0.0, -20.0, 0.0, 0.0, -1.0]
    ratio.sum().backward()
    assert values.grad.tolist() == [1.0, 0.0, 0.0, 0.0, 1.0]
