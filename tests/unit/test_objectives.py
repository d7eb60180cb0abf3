"""Every objective and aggregation against the scalar reference, gradients by autograd against closed forms, and micro-batching."""

import math
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from e2e_fp8.config.correction import CorrectionConfig
from e2e_fp8.config.objective import KIND_DEFAULTS, ObjectiveConfig
from e2e_fp8.observability.names import check_names
from e2e_fp8.types import PackedBatch, TokenStats
from e2e_fp8.update.aggregation import loss_denominator
from e2e_fp8.update.kl import kl_estimate
from e2e_fp8.update.loss_fn import make_loss_fn
from e2e_fp8.update.policy_loss import binary_kl, clipped_ratio_loss, sapo_loss
from e2e_fp8.update.rewards import soft_overlong_penalty
from e2e_fp8.update.value import clipped_value_loss, generalized_advantages, whitened

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from references import objectives_reference as reference
from references.objectives_reference import Settings, Token

INF, NAN = math.inf, math.nan
KINDS = sorted(KIND_DEFAULTS)
MODES = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
NO_CORRECTION = CorrectionConfig(rollout_is=None)
LOG_PROB = st.sampled_from([-INF, 0.0, -1.0]) | st.floats(-3, 0) | st.floats(-40, 0)
ADVANTAGE = st.sampled_from([0.0, 1.0, -1.0]) | st.floats(-3, 3)
JUNK = st.sampled_from([-INF, INF, NAN]) | st.floats(-40, 0)
TRAINED = st.builds(Token, log_prob=LOG_PROB, old=LOG_PROB, ref=LOG_PROB, advantage=ADVANTAGE, mask=st.just(1), weight=st.floats(0, 3))
SILENT = st.builds(Token, log_prob=JUNK, old=JUNK, ref=JUNK, advantage=JUNK, mask=st.just(0), weight=JUNK)
SEQUENCES = st.lists(st.lists(TRAINED | SILENT, min_size=1, max_size=5), min_size=1, max_size=4)


def pack(sequences: list[list[Token]]) -> tuple[TokenStats, PackedBatch]:
    tokens = [t for s in sequences for t in s]

    def column(name: str) -> torch.Tensor:
        return torch.tensor([getattr(t, name) for t in tokens], dtype=torch.float64)

    boundaries = torch.tensor([0, *[len(s) for s in sequences]], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    zeros = torch.zeros(len(tokens), dtype=torch.int64)
    batch = PackedBatch(
        token_ids=zeros,
        position_ids=zeros,
        cu_seqlens=boundaries,
        targets=zeros,
        loss_mask=column("mask"),
        advantages=column("advantage"),
        rollout_log_probs=column("old"),
        old_log_probs=column("old"),
        ref_log_probs=column("ref"),
        importance_weights=column("weight"),
    )
    return TokenStats(log_probs=column("log_prob").requires_grad_(), entropy=column("entropy")), batch


def config_of(s: Settings) -> ObjectiveConfig:
    names = [n for n in s.__dataclass_fields__ if n not in ("norm", "kind")]
    return ObjectiveConfig(kind=s.kind, **{n: getattr(s, n) for n in names})


def settings_of(kind: str, **fields) -> Settings:
    """The kind's own defaults, and ``fields`` on top."""
    objective = ObjectiveConfig(kind=kind, **{k: v for k, v in fields.items() if k != "norm"})
    return Settings(**{n: getattr(objective, n) for n in Settings.__dataclass_fields__ if n != "norm"}, norm=fields.get("norm", 1.0))


def evaluate(sequences: list[list[Token]], s: Settings) -> tuple[float, list[float], dict[str, float], float]:
    """Loss sum, gradient, metric sums, denominator."""
    stats, batch = pack(sequences)
    loss, metrics = make_loss_fn(config_of(s), NO_CORRECTION, max_response_tokens=int(s.norm))(stats, batch)
    loss.backward()
    return loss.item(), stats.log_probs.grad.tolist(), {n: float(v) for n, v in metrics.items()}, loss_denominator([batch], s.loss_agg_mode)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=60)
@given(
    sequences=SEQUENCES,
    mode=st.sampled_from(MODES),
    kl=st.sampled_from([(0.0, "k3"), (0.1, "k1"), (0.1, "k2"), (0.1, "k3"), (0.1, "k1+"), (0.1, "k3+")]),
    entropy_coef=st.sampled_from([0.0, 0.2]),
)
def test_loss_gradient_and_metrics_match_the_scalar_reference(kind, sequences, mode, kl, entropy_coef):
    s = settings_of(kind, loss_agg_mode=mode, kl_coef=kl[0], kl_estimator=kl[1], entropy_coef=entropy_coef, norm=7.0)
    total, gradient, metrics, denominator = evaluate(sequences, s)
    expected = reference.batch(sequences, s)
    size = 1e-9 * (1 + max((abs(g) for row in expected.gradient for g in row), default=0.0))
    assert total == pytest.approx(expected.total, rel=1e-9, abs=size)
    assert gradient == pytest.approx([g for row in expected.gradient for g in row], rel=1e-9, abs=size)
    assert denominator == expected.denominator
    counts = (metrics["clip_fraction/low"], metrics["clip_fraction/high"], metrics.get("clip_fraction/dual", 0.0))
    assert counts == (expected.low, expected.high, expected.dual)
    check_names(metrics)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 10_000), cuts=st.sets(st.integers(1, 7), max_size=4))
def test_result_does_not_depend_on_the_micro_batches(kind, mode, seed, cuts):
    """The gradient of the sums of all pieces over the one denominator is that of the whole, on as many ranks as there are pieces."""
    generator = torch.Generator().manual_seed(seed)

    def token() -> Token:
        values = torch.randn(5, generator=generator, dtype=torch.float64).tolist()
        trained = int(values[4] > -0.7)
        return Token(-abs(values[0]), -abs(values[1]), -abs(values[2]), values[3], trained, weight=abs(values[4]))

    sequences = [[token() for _ in range(1 + int(torch.randint(6, (1,), generator=generator)))] for _ in range(8)]
    s = settings_of(kind, loss_agg_mode=mode, kl_coef=0.1, entropy_coef=0.1, norm=5.0)
    whole, gradient, _, denominator = evaluate(sequences, s)
    parts = [evaluate(sequences[a:b], s) for a, b in pairwise(sorted({0, 8, *cuts}))]
    assert math.fsum(p[0] for p in parts) == pytest.approx(whole, rel=1e-12, abs=1e-12)
    # vectorised sigmoid and exponential differ in the last bit between an array's body and its tail
    assert [g for p in parts for g in p[1]] == pytest.approx(gradient, rel=1e-14, abs=1e-300)
    assert sum(p[3] for p in parts) == denominator


@pytest.mark.parametrize("kind", [k for k in KINDS if not k.startswith("gspo")])
def test_on_policy_every_objective_has_the_policy_gradient(kind):
    """At lp = old the gradient is -A: REINFORCE with the group baseline. SAPO's 4/tau makes it so too."""
    tokens = [[Token(-0.5, -0.5, -0.5, a, 1) for a in (1.0, -2.0, 0.5)]]
    _, gradient, _, _ = evaluate(tokens, settings_of(kind, loss_agg_mode="token-mean"))
    assert gradient == pytest.approx([-1.0, 2.0, -0.5], rel=1e-12)


def test_gspo_and_its_token_form_agree_for_one_advantage_a_sequence():
    """arXiv 2507.18071, section 4.3: same value, same clipping, same gradient."""
    rows = [[Token(-0.5, -0.5002, 0.0, 1.0, 1), Token(-1.0, -0.9999, 0.0, 1.0, 1), Token(-2.0, -2.0001, 0.0, 1.0, 1)]]
    for sign in (1.0, -1.0):
        signed = [[Token(t.log_prob, t.old, t.ref, sign, 1) for t in rows[0]]]
        one, two = (evaluate(signed, settings_of(kind)) for kind in ("gspo", "gspo_token"))
        assert one[0] == pytest.approx(two[0], rel=1e-12)
        assert one[1] == pytest.approx(two[1], rel=1e-12)
        assert any(one[1])


def test_gspo_clips_whole_sequences():
    rows = [[Token(-0.5, -0.502, 0.0, 1.0, 1), Token(-1.0, -1.0, 0.0, 1.0, 1)], [Token(-0.5, -0.502, 0.0, -1.0, 1)]]
    _, gradient, metrics, _ = evaluate(rows, settings_of("gspo"))
    assert gradient[:2] == [0.0, 0.0]
    assert metrics["clip_fraction/high"] == 2.0
    assert gradient[2] > 0


def test_dual_clip_bounds_the_loss_of_a_negative_advantage_alone():
    log_ratio = torch.tensor([math.log(5.0), math.log(2.9), math.log(5.0)], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([-2.0, -2.0, 2.0], dtype=torch.float64)
    result = clipped_ratio_loss(log_ratio, advantages, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    result.loss.sum().backward()
    assert result.loss.tolist() == pytest.approx([6.0, 5.8, -2.4])
    assert log_ratio.grad.tolist() == pytest.approx([0.0, 5.8, 0.0])
    assert result.dual.tolist() == [1.0, 0.0, 0.0]


def test_cispo_keeps_a_gradient_where_grpo_clips():
    token = [[Token(-0.1, -1.0, 0.0, 1.0, 1)]]
    assert evaluate(token, settings_of("grpo"))[1] == [0.0]
    assert evaluate(token, settings_of("cispo"))[1] == pytest.approx([-1.2])


def test_sapo_gate_is_widest_on_policy_and_steeper_for_negative_advantages():
    log_ratio = torch.tensor([0.0, 0.5, 0.5], dtype=torch.float64, requires_grad=True)
    sapo_loss(log_ratio, torch.tensor([1.0, 1.0, -1.0], dtype=torch.float64), tau_pos=1.0, tau_neg=1.05).loss.sum().backward()
    gate = (log_ratio.grad.abs() / log_ratio.detach().exp()).tolist()
    assert gate[0] == pytest.approx(1.0)
    assert gate[0] > gate[1] > gate[2]


def test_dppo_stops_by_divergence_and_not_by_ratio():
    """A rare token may triple its probability; a likely one may not move by 0.2."""
    rare, likely = Token(math.log(3e-4), math.log(1e-4), 0.0, 1.0, 1), Token(math.log(0.8), math.log(0.6), 0.0, 1.0, 1)
    for kind in ("dppo_tv", "dppo_kl"):
        _, gradient, metrics, _ = evaluate([[rare, likely]], settings_of(kind))
        assert gradient == pytest.approx([-3.0, 0.0])
        assert metrics["clip_fraction/high"] == 1.0
    back = Token(math.log(0.6), math.log(0.9), 0.0, 1.0, 1)
    assert evaluate([[back]], settings_of("dppo_kl"))[1] == pytest.approx([-2.0 / 3.0])


def test_binary_kl_is_zero_only_at_equality():
    lp = torch.linspace(-6, -1e-6, 50, dtype=torch.float64)
    matrix = binary_kl(lp[:, None].expand(50, 50), lp[None, :].expand(50, 50))
    assert float(matrix.diagonal().abs().max()) < 1e-12
    assert bool((matrix + torch.eye(50) > 0).all())


def test_kl_gradients_average_to_that_of_the_divergence_for_k2_alone():
    """Exact expectation over a small vocabulary: k2, k1+ and k3+ give dKL/dlogits; k1 gives 0, k3 that of the reverse KL."""
    logits, ref = torch.randn(2, 7, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    ref = ref.log_softmax(-1)

    def gradient(loss_of_lp) -> torch.Tensor:
        x = logits.clone().requires_grad_()
        return torch.autograd.grad(loss_of_lp(x.log_softmax(-1)), x)[0]

    true = gradient(lambda lp: (lp.exp() * (lp - ref)).sum())
    reverse = gradient(lambda lp: (ref.exp() * (ref - lp)).sum())
    estimates = {
        name: gradient(lambda lp, name=name: (lp.exp().detach() * kl_estimate(ref - lp, name)).sum())
        for name in ("k1", "k2", "k3", "k1+", "k3+")
    }
    for name in ("k2", "k1+", "k3+"):
        torch.testing.assert_close(estimates[name], true, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(estimates["k1"], torch.zeros(7, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(estimates["k3"], reverse, rtol=1e-10, atol=1e-12)
    value = float((logits.softmax(-1) * kl_estimate(ref - logits.log_softmax(-1), "k3+")).sum())
    assert value == pytest.approx(float((logits.softmax(-1) * (logits.log_softmax(-1) - ref)).sum()))


def test_reinforce_has_no_ratio_in_the_loss():
    stats, batch = pack([[Token(-0.5, -3.0, 0.0, 1.5, 1, weight=2.0)]])
    loss, metrics = make_loss_fn(ObjectiveConfig(), CorrectionConfig(preset="bypass_pg_is"))(stats, batch)
    loss.backward()
    assert loss.item() == pytest.approx(1.5)
    assert stats.log_probs.grad.tolist() == [-3.0]
    assert float(metrics["clip_fraction/high"]) == 0.0


@settings(deadline=None, max_examples=50)
@given(
    rows=st.lists(st.lists(st.tuples(st.floats(-2, 2), st.floats(-2, 2), st.booleans()), min_size=1, max_size=6), min_size=1, max_size=4),
    gamma=st.sampled_from([1.0, 0.9]),
    lam=st.sampled_from([1.0, 0.95, 0.0]),
)
def test_generalized_advantages_match_the_definition_and_pass_over_masked_tokens(rows, gamma, lam):
    rewards, values, mask = (torch.tensor([t[i] for r in rows for t in r], dtype=torch.float64) for i in range(3))
    rewards, values = (torch.where(mask > 0, x, torch.full_like(x, NAN)) for x in (rewards, values))
    boundaries = torch.tensor([0, *[len(r) for r in rows]]).cumsum(0)
    advantages, returns = generalized_advantages(rewards, values, mask, boundaries, gamma=gamma, lam=lam)
    expected = []
    for row in rows:
        kept = [t for t in row if t[2]]
        found = iter(reference.generalized_advantages([t[0] for t in kept], [t[1] for t in kept], gamma, lam))
        expected += [next(found) if t[2] else 0.0 for t in row]
    assert advantages.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    trained = mask > 0
    torch.testing.assert_close(returns[trained], (advantages + values)[trained])


def test_value_loss_is_the_larger_of_the_two_errors():
    values = torch.tensor([1.0, 1.0, 0.1], dtype=torch.float64, requires_grad=True)
    old, returns = torch.zeros(3, dtype=torch.float64), torch.tensor([2.0, -1.0, 2.0], dtype=torch.float64)
    loss = clipped_value_loss(values, old, returns, clip=0.2)
    loss.sum().backward()
    # clipped to 0.2: error 1.8 > 1.0, no gradient; then 2.0 > 1.2; within the range both are the same
    assert loss.tolist() == pytest.approx([1.62, 2.0, 1.805])
    assert values.grad.tolist() == pytest.approx([0.0, 2.0, -1.9])


def test_whitened_values_have_mean_zero_and_unit_deviation():
    values = torch.tensor([1.0, 2.0, NAN, 6.0], dtype=torch.float64)
    result = whitened(values, torch.tensor([1.0, 1.0, 0.0, 1.0]))
    assert result[2] == 0.0
    assert result.mean().item() == pytest.approx(0.0, abs=1e-12)
    assert result[[0, 1, 3]].std().item() == pytest.approx(1.0, rel=1e-6)


def test_soft_overlong_penalty_by_hand():
    lengths = torch.tensor([0, 12, 14, 15, 16, 20])
    assert soft_overlong_penalty(lengths, max_tokens=16, buffer_tokens=4).tolist() == [0.0, 0.0, -0.5, -0.75, -1.0, -1.0]
    assert soft_overlong_penalty(lengths, max_tokens=16, buffer_tokens=0).tolist() == [0.0] * 6
    with pytest.raises(ValueError, match="does not fit below 16"):
        soft_overlong_penalty(lengths, max_tokens=16, buffer_tokens=16)
