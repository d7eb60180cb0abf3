"""Gradients of the whole loss function at its corners: on policy, at extreme ratios, beside arrays full of nan."""

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from e2e_fp8.config.correction import CorrectionConfig
from e2e_fp8.config.objective import ObjectiveConfig
from e2e_fp8.correction.importance import safe_log_ratio
from e2e_fp8.types import PackedBatch, TokenStats
from e2e_fp8.update.aggregation import token_sum
from e2e_fp8.update.kl import kl_estimate
from e2e_fp8.update.loss_fn import supervised_loss_fn
from e2e_fp8.update.policy_loss import clipped_ratio_loss

sys.path.insert(0, str(Path(__file__).parent))
from correction_cases import loss_of

NAN = math.nan
NO_CORRECTION = CorrectionConfig(rollout_is=None)


def make_batch(mask: torch.Tensor, **arrays: torch.Tensor) -> PackedBatch:
    """One float32 sequence as the engines carry it; arrays not given are 0."""
    count = len(mask)
    zeros = torch.zeros(count)
    fields = {"advantages": zeros, "rollout_log_probs": zeros, "old_log_probs": zeros, **arrays}
    return PackedBatch(
        token_ids=torch.zeros(count, dtype=torch.int64),
        position_ids=torch.arange(count),
        cu_seqlens=torch.tensor([0, count], dtype=torch.int32),
        targets=torch.zeros(count, dtype=torch.int64),
        loss_mask=mask,
        **fields,
    )


def test_on_policy_gradient_through_the_loss_function_is_exactly_minus_the_advantage():
    """Old log-probs bit-equal to the current ones, as in the first mini-batch of every step: a log ratio of 0 keeps its gradient."""
    log_probs = (-3 * torch.rand(200)).requires_grad_()
    advantages, mask = torch.randn(200), (torch.rand(200) < 0.8).float()
    old = log_probs.detach().clone()
    batch = make_batch(mask, advantages=advantages, old_log_probs=old, rollout_log_probs=old)
    for correction in (NO_CORRECTION, CorrectionConfig()):
        log_probs.grad = None
        loss, metrics = loss_of(ObjectiveConfig(), correction)(TokenStats(log_probs=log_probs, entropy=torch.zeros(200)), batch)
        loss.backward()
        assert torch.equal(log_probs.grad, torch.where(mask > 0, -advantages, torch.zeros(200)))
        assert float(metrics["ratio/mean"]) == float(mask.sum())
        assert float(metrics["clip_fraction/low"]) == float(metrics["clip_fraction/high"]) == 0.0


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**31), junk=st.sampled_from([NAN, math.inf, -math.inf]))
def test_no_array_leaks_from_outside_the_mask(seed, junk):
    """Loss and gradients are the same bits whatever the masked entries of any array hold."""
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.rand(12, generator=generator) < 0.6).float()
    values = dict(
        zip(
            ("lp", "entropy", "old_log_probs", "rollout_log_probs", "ref_log_probs", "advantages"),
            torch.randn(6, 12, generator=generator),
            strict=True,
        )
    )
    loss_fn = loss_of(ObjectiveConfig(kl_coef=0.3, entropy_coef=0.1), CorrectionConfig())

    def evaluate(outside: float) -> list[torch.Tensor]:
        filled = {name: torch.where(mask > 0, v, torch.full_like(v, outside)) for name, v in values.items()}
        log_probs, entropy = filled.pop("lp").requires_grad_(), filled.pop("entropy").requires_grad_()
        loss, metrics = loss_fn(TokenStats(log_probs=log_probs, entropy=entropy), make_batch(mask, **filled))
        loss.backward()
        return [loss.detach(), log_probs.grad, entropy.grad, *metrics.values()]

    clean, dirty = evaluate(0.0), evaluate(junk)
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))
    assert not any(bool(a.isnan().any()) for a in dirty)


def test_entropy_bonus_has_a_negative_gradient_on_trained_tokens_alone():
    mask = torch.tensor([1.0, 0.0, 1.0])
    entropy = torch.tensor([0.5, NAN, 2.0], requires_grad=True)
    stats = TokenStats(log_probs=torch.zeros(3), entropy=entropy)
    loss, _ = loss_of(ObjectiveConfig(entropy_coef=0.25), NO_CORRECTION)(stats, make_batch(mask))
    loss.backward()
    assert loss.item() == -0.25 * 2.5
    assert entropy.grad.tolist() == [-0.25, 0.0, -0.25]


def test_importance_weight_scales_the_gradient_and_takes_none():
    rollout = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    old = torch.tensor([-1.0, -1.5, 9.0], requires_grad=True)
    log_probs = old.detach().clone().requires_grad_()
    batch = make_batch(torch.ones(3), advantages=torch.ones(3), old_log_probs=old, rollout_log_probs=rollout)
    loss, _ = loss_of(ObjectiveConfig(), CorrectionConfig(rollout_is_threshold=2.0))(
        TokenStats(log_probs=log_probs, entropy=torch.zeros(3)), batch
    )
    loss.backward()
    assert log_probs.grad.tolist() == pytest.approx([-1.0, -math.exp(-0.5), -2.0], rel=1e-6)
    assert log_probs.grad[2] == -2.0
    assert rollout.grad is None


@settings(deadline=None, max_examples=80)
@given(log_ratio=st.floats(-20, 20), advantage=st.floats(-100, 100))
def test_extreme_ratios_are_finite_and_the_clip_never_lowers_the_loss(log_ratio, advantage):
    x = torch.tensor([log_ratio], dtype=torch.float64, requires_grad=True)
    loss = clipped_ratio_loss(x, torch.tensor([advantage], dtype=torch.float64), clip_low=0.2, clip_high=0.28).loss
    loss.sum().backward()
    ratio = float(x.detach().exp())
    clipped = (advantage > 0 and ratio > 1.28) or (advantage < 0 and ratio < 0.8)
    # numbers below the smallest normal one may be flushed to zero, as the processor is set
    assert float(x.grad) == pytest.approx(0.0 if clipped else -ratio * advantage, rel=1e-12, abs=sys.float_info.min)
    assert loss.item() >= -ratio * advantage
    assert math.isfinite(loss.item())


def test_k3_gradient_is_one_minus_the_ratio_and_ends_at_the_clamp():
    log_probs = torch.tensor([-1.0, -1.0, -1.0, -60.0], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([-1.0, -1.5, -0.5, -1.0], dtype=torch.float64)
    kl = kl_estimate(safe_log_ratio(ref, log_probs, torch.ones(4)), "k3")
    kl.sum().backward()
    assert kl.tolist() == pytest.approx([0.0, math.exp(-0.5) - 0.5, math.exp(0.5) - 1.5, math.exp(20) - 21], rel=1e-12)
    assert log_probs.grad.tolist() == pytest.approx([0.0, 1 - math.exp(-0.5), 1 - math.exp(0.5), 0.0])


def test_supervised_loss_ignores_nan_outside_its_mask():
    log_probs = torch.tensor([-1.0, NAN, -math.inf, -2.0], requires_grad=True)
    stats = TokenStats(log_probs=log_probs, entropy=torch.full((4,), NAN))
    loss, _ = supervised_loss_fn()(stats, make_batch(torch.tensor([1.0, 0.0, 0.0, 1.0])))
    loss.backward()
    assert loss.item() == 3.0
    assert log_probs.grad.tolist() == [-1.0, 0.0, 0.0, -1.0]


def test_token_sum_ignores_whatever_is_outside_the_mask():
    values = torch.tensor([1.0, NAN, math.inf, 2.0], requires_grad=True)
    total = token_sum(values, torch.tensor([1.0, 0.0, 0.0, 1.0]))
    total.backward()
    assert total.item() == 3.0
    assert values.grad.tolist() == [1.0, 0.0, 0.0, 1.0]


def test_micro_batches_without_trained_tokens_add_exactly_nothing():
    stats = TokenStats(log_probs=torch.full((3,), NAN, requires_grad=True), entropy=torch.full((3,), NAN))
    batch = replace(make_batch(torch.zeros(3)), ref_log_probs=torch.full((3,), NAN))
    loss, metrics = loss_of(ObjectiveConfig(kl_coef=1.0, entropy_coef=1.0), CorrectionConfig())(stats, batch)
    loss.backward()
    assert loss.item() == 0.0
    assert stats.log_probs.grad.tolist() == [0.0] * 3
    assert all(m.item() == 0.0 for m in metrics.values())
