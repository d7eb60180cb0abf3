"""Advantages, policy loss and loss functions against the scalar reference; gradients by autograd against the closed form."""

import math
import sys
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from e2e_fp8.config.correction import CorrectionConfig
from e2e_fp8.config.objective import ObjectiveConfig
from e2e_fp8.observability.names import check_names
from e2e_fp8.types import PackedBatch, TokenStats
from e2e_fp8.update.advantages import group_advantages
from e2e_fp8.update.loss_fn import supervised_loss_fn
from e2e_fp8.update.policy_loss import clipped_ratio_loss

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from references import correction_reference, grpo_reference

sys.path.insert(0, str(Path(__file__).parent))
from correction_cases import loss_of

INF, NAN = math.inf, math.nan
LOG_PROB = st.sampled_from([-INF, 0.0]) | st.floats(-40, 0)
MASKED = st.sampled_from([-INF, INF, NAN]) | st.floats(-40, 0)
ADVANTAGE = st.sampled_from([0.0, 1.0, -1.0]) | st.floats(-3, 3)
# log-prob, old, rollout, reference, advantage, mask
TOKENS = st.lists(
    st.tuples(LOG_PROB, LOG_PROB, LOG_PROB, LOG_PROB, ADVANTAGE, st.just(1))
    | st.tuples(MASKED, MASKED, MASKED, MASKED, st.just(0.0), st.just(0)),
    min_size=1,
    max_size=10,
)


def batch_of(tokens: list[tuple]) -> tuple[torch.Tensor, PackedBatch]:
    """Log-probs that want a gradient, and one sequence that holds ``tokens``; float64 throughout."""
    log_probs, old, rollout, ref, advantages, mask = (torch.tensor([t[i] for t in tokens], dtype=torch.float64) for i in range(6))
    count = len(tokens)
    batch = PackedBatch(
        token_ids=torch.zeros(count, dtype=torch.int64),
        position_ids=torch.arange(count),
        cu_seqlens=torch.tensor([0, count], dtype=torch.int32),
        targets=torch.zeros(count, dtype=torch.int64),
        loss_mask=mask,
        advantages=advantages,
        rollout_log_probs=rollout,
        old_log_probs=old,
        ref_log_probs=ref,
    )
    return log_probs.requires_grad_(), batch


def stats_of(log_probs: torch.Tensor) -> TokenStats:
    return TokenStats(log_probs=log_probs, entropy=torch.full_like(log_probs, 0.5))


def random_tokens(count: int, seed: int) -> list[tuple]:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, 5, generator=generator, dtype=torch.float64)
    mask = (torch.rand(count, generator=generator) < 0.7).tolist()
    return [(*(-v[:4].abs()).tolist(), float(v[4]) * m, int(m)) for v, m in zip(values, mask, strict=True)]


def expected_loss(tokens: list[tuple], objective: ObjectiveConfig, threshold: float | None) -> tuple[float, list[float], dict[str, float]]:
    """Loss sum, gradient by log-prob, metric sums."""
    total, gradient, sums = (
        0.0,
        [],
        dict.fromkeys(("tokens/trained", "clip_fraction/low", "clip_fraction/high", "ratio/mean", "kl_ref"), 0.0),
    )
    for log_prob, old, rollout, ref, advantage, mask in tokens:
        if not mask:
            gradient.append(0.0)
            continue
        loss, slope, low, high = grpo_reference.token(log_prob, old, advantage, objective.clip_low, objective.clip_high)
        weight = 1.0 if threshold is None else correction_reference.weights([old], [rollout], [1], threshold)[0][0]
        kl, kl_slope = grpo_reference.k3(log_prob, ref)
        equal_infinities = math.isinf(log_prob) and log_prob == old
        total += weight * loss + objective.kl_coef * kl - objective.entropy_coef * 0.5
        gradient.append(weight * (0.0 if equal_infinities else slope) + objective.kl_coef * kl_slope)
        sums["tokens/trained"] += 1
        sums["clip_fraction/low"] += low
        sums["clip_fraction/high"] += high
        sums["ratio/mean"] += math.exp(correction_reference.bounded(correction_reference.difference(log_prob, old)))
        sums["kl_ref"] += kl
    return total, gradient, sums


@given(tokens=TOKENS, kl_coef=st.sampled_from([0.0, 0.1]), entropy_coef=st.sampled_from([0.0, 0.2]), threshold=st.sampled_from([None, 2.0]))
def test_loss_gradient_and_metrics_match_the_scalar_formulas(tokens, kl_coef, entropy_coef, threshold):
    objective = ObjectiveConfig(kl_coef=kl_coef, entropy_coef=entropy_coef)
    correction = CorrectionConfig(rollout_is=threshold and "token", rollout_is_threshold=threshold or 2.0)
    log_probs, batch = batch_of(tokens)
    loss, metrics = loss_of(objective, correction)(stats_of(log_probs), batch)
    total, gradient, sums = expected_loss(tokens, objective, threshold)
    assert loss.item() == pytest.approx(total, rel=1e-10, abs=1e-10)
    loss.backward()
    assert log_probs.grad.tolist() == pytest.approx(gradient, rel=1e-10, abs=1e-12)
    sums |= {"loss": total}
    if not kl_coef:
        del sums["kl_ref"]
    assert {name: value.item() for name, value in metrics.items()} == pytest.approx(sums, rel=1e-10, abs=1e-10)
    assert not any(value.requires_grad for value in metrics.values())


@pytest.mark.parametrize("value", [NAN, INF, -INF, -1.0])
def test_everything_masked_gives_zero_loss_and_gradient(value):
    log_probs, batch = batch_of([(value, value, value, value, 0.0, 0)] * 3)
    loss, metrics = loss_of(ObjectiveConfig(kl_coef=0.1, entropy_coef=0.1), CorrectionConfig())(stats_of(log_probs), batch)
    loss.backward()
    assert loss.item() == 0.0
    assert log_probs.grad.tolist() == [0.0, 0.0, 0.0]
    assert all(v.item() == 0.0 for v in metrics.values())


def test_clipped_tokens_have_exactly_no_gradient_and_the_others_do():
    ratio = torch.tensor([0.5, 0.5, 1.0, 1.5, 1.5], dtype=torch.float64)
    advantages = torch.tensor([-1.0, 1.0, 1.0, 1.0, -1.0], dtype=torch.float64)
    log_ratio = ratio.log().requires_grad_()
    result = clipped_ratio_loss(log_ratio, advantages, clip_low=0.2, clip_high=0.28)
    result.loss.sum().backward()
    assert result.low.tolist() == [1, 0, 0, 0, 0]
    assert result.high.tolist() == [0, 0, 0, 1, 0]
    assert log_ratio.grad.tolist() == pytest.approx([0.0, -0.5, -1.0, 0.0, 1.5])
    assert log_ratio.grad[0] == 0
    assert log_ratio.grad[3] == 0


def test_on_policy_gradient_is_minus_the_advantage():
    log_probs = torch.randn(50).requires_grad_()
    advantages = torch.randn(50)
    clipped_ratio_loss(log_probs - log_probs.detach(), advantages, clip_low=0.2, clip_high=0.28).loss.sum().backward()
    assert torch.equal(log_probs.grad, -advantages)


@given(seed=st.integers(0, 10_000), cuts=st.lists(st.integers(0, 40), max_size=4))
def test_token_mean_does_not_depend_on_the_micro_batches(seed, cuts):
    tokens = random_tokens(40, seed)
    loss_fn, denominator = (
        loss_of(ObjectiveConfig(kl_coef=0.1, entropy_coef=0.01), CorrectionConfig()),
        max(sum(t[5] for t in tokens), 1),
    )

    def cut(bounds: list[int]) -> tuple[float, torch.Tensor, dict[str, float]]:
        value, gradients, sums = 0.0, [], {}
        for start, end in pairwise(bounds):
            log_probs, batch = batch_of(tokens[start:end])
            loss, metrics = loss_fn(stats_of(log_probs), batch)
            (loss / denominator).backward()
            value += loss.item() / denominator
            gradients.append(log_probs.grad)
            sums = {name: sums.get(name, 0.0) + v.item() / denominator for name, v in metrics.items()}
        return value, torch.cat(gradients), sums

    bounds = sorted({0, 40, *cuts})
    whole, parts = cut([0, 40]), cut(bounds)
    assert parts[0] == pytest.approx(whole[0], rel=1e-12, abs=1e-14)
    assert torch.equal(parts[1], whole[1])
    assert parts[2] == pytest.approx(whole[2], rel=1e-12, abs=1e-14)


def test_importance_weight_multiplies_the_policy_loss_alone():
    tokens = [(-1.0, -1.0, -2.0, -1.5, 1.0, 1)]
    weight = min(math.exp(1.0), 2.0)
    log_probs, batch = batch_of(tokens)
    with_kl = loss_of(ObjectiveConfig(kl_coef=1.0), CorrectionConfig(rollout_is_threshold=2.0))(stats_of(log_probs), batch)[0]
    assert with_kl.item() == pytest.approx(-weight + math.exp(-0.5) + 0.5 - 1)
    none = loss_of(ObjectiveConfig(), CorrectionConfig(rollout_is=None))(stats_of(log_probs), batch)[0]
    assert none.item() == -1.0


def test_a_trained_nan_reaches_the_loss():
    log_probs, batch = batch_of([(NAN, -1.0, -1.0, -1.0, 1.0, 1)])
    assert math.isnan(loss_of(ObjectiveConfig(), CorrectionConfig())(stats_of(log_probs), batch)[0].item())


def test_metric_names_are_in_the_table_and_a_missing_reference_is_refused():
    log_probs, batch = batch_of(random_tokens(5, 0))
    loss_fn = loss_of(ObjectiveConfig(kl_coef=0.1), CorrectionConfig())
    check_names(loss_fn(stats_of(log_probs), batch)[1])
    with pytest.raises(ValueError, match="no ref_log_probs"):
        loss_fn(stats_of(log_probs), replace(batch, ref_log_probs=None))


@given(tokens=TOKENS)
def test_supervised_loss_is_the_summed_negative_log_likelihood(tokens):
    log_probs, batch = batch_of(tokens)
    loss, metrics = supervised_loss_fn()(stats_of(log_probs), batch)
    loss.backward()
    assert loss.item() == pytest.approx(-math.fsum(t[0] for t in tokens if t[5]), rel=1e-12)
    assert log_probs.grad.tolist() == [-float(t[5]) for t in tokens]
    assert metrics["loss"].item() == loss.item()


def test_the_loss_reads_log_probs_in_float32_too():
    """The carriers are float32; the result is near the float64 one."""
    log_probs, batch = batch_of(random_tokens(200, 3))
    arrays = {f.name: getattr(batch, f.name) for f in fields(batch)}
    single = replace(batch, **{n: v.float() for n, v in arrays.items() if v is not None and v.is_floating_point()})
    loss_fn = loss_of(ObjectiveConfig(), CorrectionConfig())
    loss = loss_fn(stats_of(log_probs.detach().float()), single)[0]
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(loss_fn(stats_of(log_probs), batch)[0].item(), rel=1e-4, abs=1e-4)


@given(
    samples=st.lists(
        st.tuples(st.sampled_from([0.0, 1.0, 0.1, -2.0]) | st.floats(-5, 5, width=32), st.integers(0, 3)), min_size=1, max_size=20
    ),
    normalize=st.booleans(),
)
def test_advantages_match_the_scalar_formula(samples, normalize):
    rewards, groups = [s[0] for s in samples], [s[1] for s in samples]
    result, stats = group_advantages(torch.tensor(rewards).double(), torch.tensor(groups), normalize_by_std=normalize, eps=1e-6)
    expected, degenerate = grpo_reference.advantages(torch.tensor(rewards).double().tolist(), groups, normalize, 1e-6)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, torch.tensor(expected), rtol=1e-5, atol=1e-6)
    assert (stats.total, stats.degenerate) == (len(set(groups)), degenerate)
    for group in set(groups):
        assert float(result[torch.tensor(groups) == group].sum()) == pytest.approx(0.0, abs=1e-4)


def test_equal_rewards_have_exactly_no_advantage():
    # 0.1 three times does not average to 0.1 in binary
    rewards, groups = torch.tensor([0.1, 0.1, 0.1, 1.0, 0.0, 0.7]), torch.tensor([5, 5, 5, 2, 2, 9])
    result, stats = group_advantages(rewards, groups, normalize_by_std=True, eps=1e-6)
    assert result[[0, 1, 2, 5]].tolist() == [0.0] * 4
    assert result[3] == -result[4] == pytest.approx(math.sqrt(0.5), rel=1e-5)
    assert (stats.total, stats.degenerate) == (3, 2)


def test_bad_rewards_are_refused():
    with pytest.raises(ValueError, match="not finite"):
        group_advantages(torch.tensor([1.0, NAN]), torch.tensor([0, 0]), normalize_by_std=True, eps=1e-6)
    with pytest.raises(ValueError, match="equal one-dimensional shapes"):
        group_advantages(torch.zeros(2), torch.zeros(3), normalize_by_std=True, eps=1e-6)
    with pytest.raises(ValueError, match="differ"):
        clipped_ratio_loss(torch.zeros(2), torch.zeros(3), clip_low=0.2, clip_high=0.2)
