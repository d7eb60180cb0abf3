"""GAE, token rewards, whitening and the value loss against scalar references, over lengths and masks, extreme ones too."""

import math
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from e2e_fp8.config.critic import CriticConfig
from e2e_fp8.observability.names import check_names
from e2e_fp8.types import PackedBatch
from e2e_fp8.update.value import explained_variance, generalized_advantages, make_value_loss_fn, token_rewards, whitened

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from references import value_reference as reference

NAN, EPS = math.nan, 2.0**-52
NUMBER = st.sampled_from([0.0, 1.0, -1.0, 1e-9, 1e6, -1e6]) | st.floats(-3, 3)
ROW = st.lists(st.tuples(NUMBER, NUMBER, st.booleans()), min_size=1, max_size=8)
LONG_ROW = st.lists(st.tuples(st.floats(-1, 1), st.floats(-1, 1), st.sampled_from([True, True, True, False])), min_size=60, max_size=90)
ROWS = st.lists(ROW | LONG_ROW, min_size=1, max_size=5)
UNIT = st.sampled_from([0.0, 0.5, 0.95, 1.0]) | st.floats(0, 1)


def packed(rows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rewards, values, mask and boundaries; NaN wherever nothing may be read."""
    rewards, values, mask = (torch.tensor([t[i] for r in rows for t in r], dtype=torch.float64) for i in range(3))
    rewards, values = (torch.where(mask > 0, x, torch.full_like(x, NAN)) for x in (rewards, values))
    return rewards, values, mask, torch.tensor([0, *[len(r) for r in rows]]).cumsum(0)


@given(rows=ROWS, gamma=UNIT, lam=UNIT)
def test_advantages_are_the_definition_and_the_mixture_of_all_n_step_ones(rows, gamma, lam):
    rewards, values, mask, boundaries = packed(rows)
    advantages, returns = generalized_advantages(rewards, values, mask, boundaries, gamma=gamma, lam=lam)
    for row, (start, end) in zip(rows, pairwise(boundaries.tolist()), strict=True):
        # each of n terms is rounded a few times and every weight is at most 1: n roundings of the sum of all magnitudes bound the error
        bound = 64 * len(row) * EPS * sum(abs(r) + 2 * abs(v) for r, v, trained in row if trained)
        for expected in (reference.advantages(row, gamma, lam), reference.advantages_as_mixture(row, gamma, lam)):
            for found, wanted in zip(advantages[start:end].tolist(), expected, strict=True):
                assert abs(found - wanted) <= bound
        for t, (_, value, trained) in enumerate(row):
            assert returns[start + t] == (advantages[start + t] + value if trained else 0.0)


@given(rows=st.lists(st.lists(st.tuples(st.integers(-100, 100), st.booleans()), min_size=1, max_size=12), min_size=1, max_size=6))
def test_without_discount_and_values_the_advantage_is_the_reward_to_go(rows):
    rewards, values, mask, boundaries = packed([[(float(r), 0.0, trained) for r, trained in row] for row in rows])
    advantages, returns = generalized_advantages(rewards, values, mask, boundaries, gamma=1.0, lam=1.0)
    expected = [sum(r for r, on in row[t:] if on) if row[t][1] else 0 for row in rows for t in range(len(row))]
    assert advantages.tolist() == returns.tolist() == expected


@given(row=ROW, gamma=UNIT)
def test_lambda_zero_is_the_one_step_error_and_one_the_return_less_the_value(row, gamma):
    rewards, values, mask, boundaries = packed([row])
    steps = [(r, v) for r, v, trained in row if trained]
    one_step = generalized_advantages(rewards, values, mask, boundaries, gamma=gamma, lam=0.0)[0][mask > 0].tolist()
    assert one_step == [r + gamma * (steps[t + 1][1] if t + 1 < len(steps) else 0.0) - v for t, (r, v) in enumerate(steps)]
    returns = generalized_advantages(rewards, values, mask, boundaries, gamma=gamma, lam=1.0)[1][mask > 0].tolist()
    for t, found in enumerate(returns):
        wanted = math.fsum(gamma**k * r for k, (r, _) in enumerate(steps[t:]))
        assert abs(found - wanted) <= 64 * len(row) * EPS * sum(abs(r) + 2 * abs(v) for r, v in steps)


@given(rows=ROWS, seed=st.integers(0, 1000))
def test_a_response_earns_its_reward_at_its_last_trained_token(rows, seed):
    _, _, mask, boundaries = packed(rows)
    earned = torch.randn(len(rows), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    found = token_rewards(earned, mask, boundaries).tolist()
    expected = [
        reference.rewards_per_token(reward, [0.0] * len(row), [t for _, _, t in row], 0.0)
        for row, reward in zip(rows, earned.tolist(), strict=True)
    ]
    assert found == [x for row in expected for x in row]


def test_shapes_are_checked():
    zero, ends = torch.zeros(3), torch.tensor([0, 3])
    with pytest.raises(ValueError, match="shapes differ"):
        generalized_advantages(zero, zero[:2], zero, ends, gamma=1.0, lam=1.0)
    with pytest.raises(ValueError, match="rewards for 1 sequences"):
        token_rewards(torch.zeros(2), zero, ends)


@given(values=st.lists(st.tuples(st.floats(-10, 10), st.booleans()), min_size=1, max_size=30))
def test_whitening_is_over_trained_tokens_alone(values):
    x = torch.tensor([v if on else NAN for v, on in values], dtype=torch.float64)
    result = whitened(x, torch.tensor([float(on) for _, on in values]))
    kept = [v for v, on in values if on]
    # both sides subtract means that differ by a few roundings of 10, over a standard deviation of at least 1e-8
    wanted = iter(reference.whiten(kept))
    expected = [next(wanted) if on else 0.0 for _, on in values]
    assert result.tolist() == pytest.approx(expected, rel=1e-6, abs=300 * EPS * 10 / 1e-8)


def batch_of(rows, clip) -> tuple[torch.Tensor, PackedBatch]:
    """Rows of ``(value, old value, return, trained)``."""
    tokens = [t for row in rows for t in row]
    value, old, ret, mask = (torch.tensor([float(t[i]) for t in tokens], dtype=torch.float64) for i in range(4))
    blank = torch.zeros(len(tokens), dtype=torch.int64)
    cu_seqlens = torch.tensor([0, *[len(r) for r in rows]], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    fields = dict.fromkeys(("token_ids", "position_ids", "targets"), blank)
    fields |= dict.fromkeys(("advantages", "rollout_log_probs", "old_log_probs"), torch.zeros_like(value))
    return value.requires_grad_(), PackedBatch(**fields, cu_seqlens=cu_seqlens, loss_mask=mask, values=old, returns=ret)


TOKEN = st.tuples(NUMBER, NUMBER, NUMBER, st.just(True)) | st.tuples(
    st.sampled_from([NAN, math.inf, 2.0]), st.just(0.0), st.just(0.0), st.just(False)
)


@given(rows=st.lists(st.lists(TOKEN, min_size=1, max_size=8), min_size=1, max_size=4), clip=st.sampled_from([None, 0.2, 1e-6, 1e3]))
def test_value_loss_gradient_and_metrics_are_the_closed_form(rows, clip):
    values, batch = batch_of(rows, clip)
    loss, metrics = make_value_loss_fn(CriticConfig(value_clip=clip))(values, batch)
    loss.backward()
    tokens = [t for row in rows for t in row]
    expected = [reference.value_loss(v, old, ret, clip) if on else (0.0, 0.0, False) for v, old, ret, on in tokens]
    assert values.grad is not None
    assert values.grad.tolist() == [slope for _, slope, _ in expected]
    total = math.fsum(x for x, _, _ in expected)
    # sums of at most 32 non-negative numbers
    assert loss.item() == metrics["critic/vf_loss"] == pytest.approx(total, rel=32 * EPS)
    assert float(metrics.get("critic/vf_clipfrac", 0.0)) == sum(clipped for _, _, clipped in expected)
    trained = [v for v, _, _, on in tokens if on]
    assert float(metrics["critic/vpred_mean"]) == pytest.approx(math.fsum(trained), abs=32 * EPS * sum(map(abs, trained)))
    assert ("critic/vf_clipfrac" in metrics) == (clip is not None)
    check_names(metrics)


def test_value_loss_by_hand():
    rows = [[(1.0, 0.0, 2.0, True), (1.0, 0.0, -1.0, True), (0.1, 0.0, 2.0, True), (0.2, 0.0, 0.0, True)]]
    values, batch = batch_of(rows, 0.2)
    loss, metrics = make_value_loss_fn(CriticConfig(value_clip=0.2))(values, batch)
    loss.backward()
    # clipped to 0.2: error 1.8 > 1.0, no gradient; then 2.0 > 1.2; within the range, and on its edge, both are the same
    assert loss.item() == pytest.approx(1.62 + 2.0 + 1.805 + 0.02)
    assert values.grad.tolist() == pytest.approx([0.0, 2.0, -1.9, 0.2])
    assert float(metrics["critic/vf_clipfrac"]) == 1.0


def test_a_nan_value_of_a_trained_token_is_seen():
    values, batch = batch_of([[(NAN, 0.0, 1.0, True), (0.5, 0.0, 1.0, True)]], 0.2)
    loss, _ = make_value_loss_fn(CriticConfig())(values, batch)
    assert math.isnan(loss.item())


def test_a_batch_without_returns_is_refused():
    values, batch = batch_of([[(0.0, 0.0, 0.0, True)]], 0.2)
    with pytest.raises(ValueError, match="no values or no returns"):
        make_value_loss_fn(CriticConfig())(values, PackedBatch(**{**vars(batch), "returns": None}))


def test_explained_variance_of_a_perfect_a_constant_and_an_opposite_critic():
    returns = torch.tensor([0.0, 1.0, 2.0, 5.0])
    assert explained_variance(returns, returns + 3.0) == 1.0
    assert explained_variance(returns, torch.full((4,), 9.0)) == pytest.approx(0.0, abs=1e-5)
    assert explained_variance(returns, -returns) == pytest.approx(-3.0, rel=1e-4)
    assert explained_variance(torch.ones(5), torch.ones(5)) == 1.0
    assert explained_variance(returns[:1], returns[:1]) == 0.0
