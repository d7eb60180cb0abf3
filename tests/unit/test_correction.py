"""Importance weights and mismatch metrics against the scalar reference."""

import math
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from e2e_fp8.correction.diagnostics import mismatch_metrics
from e2e_fp8.correction.importance import safe_log_ratio
from e2e_fp8.observability.names import check_names

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from references import correction_reference as reference

sys.path.insert(0, str(Path(__file__).parent))
from correction_cases import token_truncated_weights

INF, NAN = math.inf, math.nan
ANY = st.sampled_from([-INF, INF, 0.0, -1e30]) | st.floats(-60, 0)
MASKED = ANY | st.just(NAN)
TOKENS = st.lists(
    st.tuples(ANY, ANY, st.just(1)) | st.tuples(MASKED, MASKED, st.just(0)),
    max_size=12,
)
FINITE = st.lists(st.lists(st.tuples(st.floats(-30, 0), st.floats(-30, 0)), min_size=1, max_size=6), min_size=1, max_size=5)
THRESHOLDS = st.sampled_from([0.5, 1.0, 2.0, 8.0])


def doubles(values) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.float64)


def packed(sequences: list[list[tuple[float, float]]], untrained: float) -> tuple[torch.Tensor, ...]:
    """Train, rollout, mask and boundaries, each sequence between two positions that are not trained and hold ``untrained``."""
    rows = [[(untrained, untrained, 0), *[(t, r, 1) for t, r in s], (untrained, untrained, 0)] for s in sequences]
    train, rollout, mask = (doubles(token[i] for row in rows for token in row) for i in range(3))
    return train, rollout, mask, torch.tensor([0, *[len(row) for row in rows]], dtype=torch.int32).cumsum(0)


@given(tokens=TOKENS, threshold=THRESHOLDS)
def test_weights_match_the_scalar_formula(tokens, threshold):
    old, rollout, mask = ([t[i] for t in tokens] for i in range(3))
    result = token_truncated_weights(doubles(old), doubles(rollout), doubles(mask), threshold)
    weights, active = reference.weights(old, rollout, mask, threshold)
    torch.testing.assert_close(result.weights, doubles(weights), rtol=1e-14, atol=0)
    assert result.out_of_bounds.tolist() == active
    assert bool(torch.isfinite(result.weights).all())


def test_weights_are_detached_and_one_on_policy():
    lp = torch.randn(64, requires_grad=True)
    result = token_truncated_weights(lp, lp.detach(), torch.ones(64), 2.0)
    assert not result.weights.requires_grad
    assert torch.equal(result.weights, torch.ones(64))
    assert result.weights.dtype == torch.float32


def test_a_trained_nan_stays_visible():
    weights = token_truncated_weights(doubles([NAN, -1.0]), doubles([-1.0, -1.0]), doubles([1, 1]), 2.0).weights
    assert math.isnan(weights[0])
    assert weights[1] == 1.0


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_no_nan_gradient_from_masked_or_infinite_positions(value):
    lp = doubles([value, -1.0, -INF, -2.0]).requires_grad_()
    old = doubles([value, -1.5, -INF, -2.0])
    safe_log_ratio(lp, old, doubles([0, 1, 1, 1])).exp().sum().backward()
    assert lp.grad.tolist() == [0.0, math.exp(0.5), 0.0, 1.0]


@given(sequences=FINITE, threshold=THRESHOLDS, untrained=st.sampled_from([0.0, NAN, -INF]))
def test_metrics_match_the_scalar_formulas(sequences, threshold, untrained):
    result = mismatch_metrics(*packed(sequences, untrained), threshold)
    expected = reference.metrics(sequences, threshold)
    assert result.keys() == expected.keys()
    for name, value in expected.items():
        # differences of squares and of neighbouring probabilities lose half of the digits
        assert result[name] == pytest.approx(value, rel=1e-9, abs=1e-9), name


@given(sequences=FINITE)
def test_equal_policies_have_no_mismatch(sequences):
    same = [[(t, t) for t, _ in s] for s in sequences]
    result = mismatch_metrics(*packed(same, NAN), 2.0)
    ones = {"ppl_ratio", "rollout_is_mean", "rollout_is_min", "rollout_is_max", "rollout_is_eff_sample_size"}
    for name, value in result.items():
        short = name.rpartition("/")[2]
        if not short.endswith("_ppl"):  # a perplexity is not a mismatch
            assert value == (1.0 if short in ones else 0.0), name
    assert result["rollout_corr/training_ppl"] == result["rollout_corr/rollout_ppl"]


@given(sequences=FINITE, seed=st.randoms())
def test_metrics_do_not_depend_on_the_order_of_sequences(sequences, seed):
    shuffled = list(sequences)
    seed.shuffle(shuffled)
    first, second = mismatch_metrics(*packed(sequences, 0.0)), mismatch_metrics(*packed(shuffled, 0.0))
    for name, value in first.items():
        assert second[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name


def test_every_name_is_in_the_metric_table():
    check_names(mismatch_metrics(*packed([[(-1.0, -2.0)]], 0.0)))


def test_k3_is_never_negative_and_estimates_the_divergence():
    generator = torch.Generator().manual_seed(7)
    rollout_V, train_V = torch.randn(2, 50, generator=generator, dtype=torch.float64).log_softmax(-1)
    token_T = torch.multinomial(rollout_V.exp(), 200_000, replacement=True, generator=generator)
    exact = float((rollout_V.exp() * (rollout_V - train_V)).sum())
    result = mismatch_metrics(train_V[token_T], rollout_V[token_T], torch.ones(200_000), torch.tensor([0, 200_000]))
    assert result["mismatch_kl"] == pytest.approx(exact, rel=0.03)
    assert result["rollout_corr/kl"] == pytest.approx(exact, rel=0.03)
    # sum over tokens of p_rollout * (p_train / p_rollout) is 1
    assert result["rollout_corr/rollout_is_mean"] == pytest.approx(1.0, abs=0.02)


def test_a_token_the_engine_thought_impossible_shows_as_infinite_divergence():
    result = mismatch_metrics(doubles([-1.0, -1.0]), doubles([-INF, -1.0]), doubles([1, 1]), torch.tensor([0, 2]))
    assert result["mismatch_kl"] == INF
    assert result["rollout_corr/kl"] == -INF
    assert result["rollout_corr/rollout_is_max"] == pytest.approx(math.exp(20))


def test_a_trained_nan_reaches_the_metrics():
    assert math.isnan(mismatch_metrics(doubles([NAN]), doubles([-1.0]), doubles([1]), torch.tensor([0, 1]))["mismatch_kl"])


def test_nothing_trained_gives_no_metrics():
    assert mismatch_metrics(doubles([-1.0]), doubles([NAN]), doubles([0]), torch.tensor([0, 1])) == {}


def test_misuse_is_refused():
    with pytest.raises(ValueError, match="shapes differ"):
        token_truncated_weights(torch.zeros(3), torch.zeros(2), torch.zeros(3), 2.0)
    with pytest.raises(ValueError, match="bounds must be positive and in order, got 0"):
        token_truncated_weights(torch.zeros(3), torch.zeros(3), torch.zeros(3), 0.0)
    with pytest.raises(ValueError, match="cu_seqlens ends at 2, not at 3"):
        mismatch_metrics(torch.zeros(3), torch.zeros(3), torch.zeros(3), torch.tensor([0, 2]))
    with pytest.raises(ValueError, match="shapes differ"):
        mismatch_metrics(torch.zeros(3), torch.zeros(2), torch.zeros(3), torch.tensor([0, 3]))
