"""Importance weights and mismatch metrics against slow float64 references, extreme and infinite log-probs included."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from e2e_fp8.correction.diagnostics import mismatch_metrics
from e2e_fp8.correction.importance import safe_log_ratio, token_truncated_weights
from tests.references import correction_reference as reference

INF, NAN = math.inf, math.nan
finite = st.floats(-60, 0, width=32)
log_prob = st.one_of(finite, st.sampled_from([0.0, -1e-6, -700.0, -INF]))


@st.composite
def packed(draw, values=log_prob):
    """(train, rollout, mask, cu_seqlens); outside the mask anything, nan included."""
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    total = sum(lengths)
    mask = draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=total, max_size=total))
    junk = st.sampled_from([NAN, INF, -INF, 0.0])
    train, rollout = ([draw(values if m else junk) for m in mask] for _ in range(2))
    return train, rollout, mask, [sum(lengths[:i]) for i in range(len(lengths) + 1)]


def metrics(train, rollout, mask, cu_seqlens, threshold=2.0):
    as_double = [torch.tensor(x, dtype=torch.float64) for x in (train, rollout)]
    return mismatch_metrics(*as_double, torch.tensor(mask), torch.tensor(cu_seqlens, dtype=torch.int32), threshold)


def assert_close(actual: dict, expected: dict) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name] == pytest.approx(value, rel=1e-9, abs=1e-9, nan_ok=True), name


@settings(deadline=None, max_examples=150)
@given(packed(finite), st.sampled_from([1.5, 2.0, 5.0]))
def test_every_metric_equals_the_reference(batch, threshold):
    train, rollout, mask, cu_seqlens = batch
    expected = reference.mismatch(train, rollout, mask, cu_seqlens, threshold) if any(mask) else {}
    assert_close(metrics(*batch, threshold), expected)


@settings(deadline=None, max_examples=150)
@given(packed())
def test_infinite_log_probs_follow_the_formulas_too(batch):
    train, rollout, mask, cu_seqlens = batch
    if any(mask):
        assert_close(metrics(*batch), reference.mismatch(train, rollout, mask, cu_seqlens, 2.0))


def test_metrics_by_hand():
    result = metrics([-1.0, -2.0, NAN, -3.0], [-1.0, -2.5, NAN, -3.0], [1.0, 1.0, 0.0, 1.0], [0, 3, 4])
    assert result["rollout_corr/kl"] == pytest.approx(-0.5 / 3)
    assert result["mismatch_kl"] == pytest.approx((math.exp(0.5) - 1.5) / 3)
    assert result["rollout_corr/log_ppl_diff"] == pytest.approx(-0.25 / 2)
    assert result["rollout_corr/chi2_seq"] == pytest.approx((math.e + 1) / 2 - 1)
    assert result["rollout_corr/training_ppl"] == pytest.approx((math.exp(1.5) + math.exp(3)) / 2)


def test_bit_equal_policies_have_no_mismatch():
    values = (-5 * torch.rand(40)).tolist()
    result = metrics(values, values, [1.0] * 40, [0, 13, 40])
    ones = {"rollout_is_mean", "rollout_is_min", "rollout_is_max", "rollout_is_eff_sample_size", "ppl_ratio"}
    for name, value in result.items():
        if "training_" not in name and "rollout_log_ppl" not in name and not name.endswith("rollout_ppl"):
            assert value == (1.0 if name.removeprefix("rollout_corr/") in ones else 0.0), name


def test_a_broken_token_shows_at_its_full_size_while_weights_stay_clamped():
    result = metrics([-500.0, -1.0], [-1.0, -1.0], [1.0, 1.0], [0, 2])
    assert result["train_rollout_logprob_abs_diff/max"] == 499.0
    assert result["rollout_corr/kl"] == 249.5
    assert result["rollout_corr/rollout_is_min"] == math.exp(-20)


def test_a_small_mismatch_survives_float32_inputs():
    rollout = torch.full((1000,), -1.0)
    train = rollout + 1e-4
    result = mismatch_metrics(train, rollout, torch.ones(1000), torch.tensor([0, 1000]))
    d = train.double() - rollout.double()
    assert result["mismatch_kl"] == pytest.approx(float((d**2).mean() / 2), rel=1e-3)


def test_nan_on_a_trained_token_is_seen():
    assert math.isnan(metrics([NAN, -1.0], [-1.0, -1.0], [1.0, 1.0], [0, 2])["mismatch_kl"])
    weights = token_truncated_weights(torch.tensor([NAN, -1.0]), torch.zeros(2), torch.ones(2), 2.0).weights
    assert weights.isnan().tolist() == [True, False]


def test_no_trained_token_gives_no_metric():
    assert metrics([-1.0], [-1.0], [0.0], [0, 1]) == {}


def test_wrong_shapes_are_refused():
    with pytest.raises(ValueError, match="cu_seqlens ends at 3"):
        metrics([-1.0] * 4, [-1.0] * 4, [1.0] * 4, [0, 3])
    with pytest.raises(ValueError, match="shapes differ"):
        safe_log_ratio(torch.zeros(3), torch.zeros(2), torch.ones(3))
    with pytest.raises(ValueError, match="threshold must be positive"):
        token_truncated_weights(torch.zeros(2), torch.zeros(2), torch.ones(2), 0.0)


@settings(deadline=None, max_examples=150)
@given(packed(), st.sampled_from([0.5, 1.0, 2.0, 5.0]))
def test_weights_equal_the_reference_and_keep_the_bound(batch, threshold):
    train, rollout, mask, _ = batch
    old = torch.tensor(train, requires_grad=True)
    result = token_truncated_weights(old, torch.tensor(rollout), torch.tensor(mask), threshold)
    assert not result.weights.requires_grad
    assert result.weights.dtype == result.truncated.dtype == torch.float32
    for t, trained in enumerate(mask):
        weight = float(result.weights[t])
        if not trained:
            assert (weight, float(result.truncated[t])) == (1.0, 0.0)
            continue
        # the difference itself is taken in float32
        difference = 0.0 if train[t] == rollout[t] else float(old.detach()[t] - torch.tensor(rollout)[t])
        expected = reference.tis_weight(difference, 0.0, threshold)
        assert weight <= threshold
        assert weight == pytest.approx(expected, rel=1e-6)
        assert float(result.truncated[t]) == float(reference.exp(difference) > threshold) or weight == threshold


def test_truncation_is_exact_at_the_bound():
    old = torch.tensor([0.0, -1e-3, 5.0, -5.0, INF])
    result = token_truncated_weights(old, torch.zeros(5), torch.ones(5), 1.0)
    assert result.weights.tolist() == [1.0, pytest.approx(math.exp(-1e-3)), 1.0, pytest.approx(math.exp(-5)), 1.0]
    assert result.truncated.tolist() == [0.0, 0.0, 1.0, 0.0, 1.0]


def test_log_ratio_keeps_its_gradient_on_policy_and_loses_it_beyond_the_clamp():
    values = torch.tensor([-1.0, -50.0, NAN, -INF], requires_grad=True)
    ratio = safe_log_ratio(values, torch.tensor([-1.0, -1.0, -1.0, -INF]), torch.tensor([1.0, 1.0, 0.0, 1.0]))
    assert ratio.tolist() == [0.0, -20.0, 0.0, 0.0]
    ratio.sum().backward()
    assert values.grad.tolist() == [1.0, 0.0, 0.0, 0.0]
