"""Losses, gradients and corrections on random batches, ours beside verl's and TRL's, and why they differ where they do.

For developers: requirements/peers.txt has the versions and says how to install them (tests/unit/test_peers.py runs this where they are).
Exits with 1 when something differs without a reason, with 2 when a peer is missing.

    PYTHONPATH=. python tools/compare_with_peers.py [--peer verl] [--peer trl] [--seed 0]
"""
# pyright: reportMissingImports=false

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version

import torch

from e2e_fp8.config.correction import DIVERGENCE_OPTIONS, RATIO_OPTIONS, CorrectionConfig
from e2e_fp8.config.objective import ObjectiveConfig
from e2e_fp8.correction.apply import correct
from e2e_fp8.correction.diagnostics import mismatch_metrics
from e2e_fp8.types import PackedBatch, TokenStats
from e2e_fp8.update.advantages import group_advantages
from e2e_fp8.update.aggregation import loss_denominator
from e2e_fp8.update.kl import kl_estimate
from e2e_fp8.update.loss_fn import make_loss_fn
from e2e_fp8.update.value import clipped_value_loss, generalized_advantages, whitened

TOLERANCE = 1e-6
"""Largest difference that counts as none: verl adds 1e-8 to divisors and works in float32 here and there."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One formula on one batch."""

    peer: str = "verl"
    name: str
    difference: float
    """Largest absolute difference of value and gradient."""
    reason: str = ""
    """Why the two differ; empty where they are to agree."""


@dataclass(frozen=True, kw_only=True)
class Padded:
    """Random batch as verl keeps it; float64 ``[B, R]``, mask with holes and right padding."""

    log_probs: torch.Tensor
    old: torch.Tensor
    rollout: torch.Tensor
    ref: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor

    @classmethod
    def random(cls, seed: int, spread: float = 0.5) -> "Padded":
        generator = torch.Generator().manual_seed(seed)
        base = -torch.rand(6, 9, generator=generator, dtype=torch.float64) * 3 - 1e-3

        def near() -> torch.Tensor:
            return (base + spread * torch.randn(base.shape, generator=generator, dtype=torch.float64)).clamp_max(-1e-4)

        mask = (torch.rand(base.shape, generator=generator) < 0.8).double()
        mask[:, 0] = 1.0
        mask[0, 4:] = 0.0
        advantages = torch.randn(6, 1, generator=generator, dtype=torch.float64).expand_as(base).contiguous()
        return cls(log_probs=near(), old=near(), rollout=near(), ref=near(), advantages=advantages, mask=mask)

    def packed(self) -> PackedBatch:
        """The same, rows back to back."""
        rows, length = self.mask.shape
        zeros = torch.zeros(rows * length, dtype=torch.int64)
        return PackedBatch(
            token_ids=zeros,
            position_ids=zeros,
            cu_seqlens=torch.arange(rows + 1, dtype=torch.int32) * length,
            targets=zeros,
            loss_mask=self.mask.flatten(),
            advantages=self.advantages.flatten(),
            rollout_log_probs=self.rollout.flatten(),
            old_log_probs=self.old.flatten(),
            ref_log_probs=self.ref.flatten(),
        )


def with_gradient(function: Callable[[torch.Tensor], torch.Tensor], log_probs: torch.Tensor) -> torch.Tensor:
    """Value and gradient of a scalar function in one array."""
    leaf = log_probs.detach().clone().requires_grad_()
    value = function(leaf)
    (gradient,) = torch.autograd.grad(value, leaf)
    return torch.cat([value.detach().reshape(1), gradient.flatten()])


def gap(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest absolute difference; a nan on either side alone is infinitely far."""
    return float(torch.nan_to_num((ours.double() - theirs.double()).abs(), nan=torch.inf).max())


def our_loss(batch: PackedBatch, objective: ObjectiveConfig, correction: CorrectionConfig | None = None) -> Callable[..., torch.Tensor]:
    """Our loss over its denominator as a function of padded log-probs."""
    loss_fn = make_loss_fn(objective, correction or CorrectionConfig(rollout_is=None), max_response_tokens=9)
    denominator = loss_denominator([batch], objective.loss_agg_mode)

    def value(log_probs: torch.Tensor) -> torch.Tensor:
        stats = TokenStats(log_probs=log_probs.flatten(), entropy=torch.zeros_like(batch.loss_mask))
        return loss_fn(stats, batch)[0] / denominator

    return value


def policy_losses(p: Padded) -> Iterator[Comparison]:
    """Each objective in its own aggregation, and GRPO in all four."""
    from verl.trainer.ppo import core_algos
    from verl.workers.config import ActorConfig

    def compare(name: str, theirs: str, objective: ObjectiveConfig, reason: str = "", cap: float = 20.0, p: Padded = p) -> Comparison:
        dppo = objective.kind.startswith("dppo")
        low, high = (objective.divergence_low, objective.divergence_high) if dppo else (objective.clip_low, objective.clip_high)
        config = ActorConfig(
            strategy="fsdp",
            rollout_n=1,
            ppo_micro_batch_size_per_gpu=1,
            clip_ratio_low=low,
            clip_ratio_high=high,
            clip_ratio_c=objective.dual_clip or cap,
        )
        function = core_algos.get_policy_loss_fn(theirs)
        fixed = {"old_log_prob": p.old, "advantages": p.advantages, "response_mask": p.mask, "config": config}
        verl = with_gradient(lambda lp: function(log_prob=lp, loss_agg_mode=objective.loss_agg_mode, **fixed)[0], p.log_probs)
        return Comparison(name=name, difference=gap(with_gradient(our_loss(p.packed(), objective), p.log_probs), verl), reason=reason)

    for mode in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"):
        yield compare(f"grpo, {mode}", "vanilla", ObjectiveConfig(loss_agg_mode=mode, dual_clip=3.0))
    yield compare("ppo with dual clip", "vanilla", ObjectiveConfig(kind="ppo"))
    no_dual = "verl has no way to turn dual clip off (clip_ratio_c, 3 by default); None here means none"
    yield compare("grpo without dual clip, verl at 1.3", "vanilla", ObjectiveConfig(), no_dual, cap=1.3)
    for kind in ("gspo", "gspo_token"):
        yield compare(kind, "gspo", ObjectiveConfig(kind=kind))
    far = "verl cuts the mean log ratio at 10; ours clamps each token's to +-20 before the mean"
    yield compare("gspo, mean log ratio above 10", "gspo", ObjectiveConfig(kind="gspo"), far, p=replace(p, old=p.old - 12.0))
    for kind in ("sapo", "cispo", "dppo_tv", "dppo_kl"):
        yield compare(kind, kind, ObjectiveConfig(kind=kind))
    sapo = "verl aggregates SAPO by seq-mean-token-mean whatever loss_agg_mode says"
    yield compare("sapo, token-mean", "sapo", ObjectiveConfig(kind="sapo", loss_agg_mode="token-mean"), sapo)
    dppo = "verl documents a ratio cap of 20 for DPPO, but its ActorConfig always holds clip_ratio_c = 3, so 3 is what runs"
    yield compare(
        "dppo_tv, verl's default cap", "dppo_tv", ObjectiveConfig(kind="dppo_tv", divergence_high=0.9, divergence_low=0.9), dppo, cap=3.0
    )


def reinforce(p: Padded) -> Iterator[Comparison]:
    """REINFORCE against the rollout policy, weights from the current one."""
    from verl.trainer.ppo import core_algos
    from verl.workers.config import ActorConfig

    correction = CorrectionConfig(preset="bypass_pg_is")
    batch = p.packed()
    batches, _ = correct([batch], [p.log_probs.flatten()], correction)
    ours = with_gradient(our_loss(batches[0], ObjectiveConfig(), correction), p.log_probs)
    weights = batches[0].importance_weights
    assert weights is not None
    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1)
    theirs = with_gradient(
        lambda lp: core_algos.compute_policy_loss_reinforce(
            rollout_log_prob=p.rollout,
            log_prob=lp,
            advantages=p.advantages,
            response_mask=p.mask,
            loss_agg_mode="token-mean",
            config=config,
            rollout_is_weights=weights.view_as(p.mask),
        )[0],
        p.log_probs,
    )
    yield Comparison(name="reinforce with sequence weights", difference=gap(ours, theirs))


def divergences(p: Padded) -> Iterator[Comparison]:
    """KL estimators, value and gradient."""
    from verl.trainer.ppo import core_algos

    for name in ("k1", "k2", "k3", "k1+", "k3+"):
        ours = with_gradient(lambda lp, n=name: kl_estimate(p.ref - lp, n).sum(), p.log_probs)
        theirs = with_gradient(lambda lp, n=name: core_algos.kl_penalty(lp, p.ref, n).sum(), p.log_probs)
        yield Comparison(name=f"KL {name}", difference=gap(ours, theirs))
    far = p.ref - 6.0
    ours, theirs = (kl_estimate(p.ref - far, "k3"), core_algos.kl_penalty(far, p.ref, "k3"))
    yield Comparison(name="KL k3 at d = 6", difference=gap(ours, theirs), reason="verl clamps k3 to +-10; ours clamps d to +-20 alone")


def weights(p: Padded) -> Iterator[Comparison]:
    """Importance weights of each level and bound."""
    from verl.trainer.ppo import rollout_corr_helper as helper

    for level in ("token", "sequence"):
        for threshold in (2.0, "0.5_5.0"):
            for normalize in (False, True):
                fields = {"rollout_is": level, "rollout_is_threshold": threshold, "rollout_is_batch_normalize": normalize}
                batches, _ = correct([p.packed()], [p.old.flatten()], CorrectionConfig(**fields))
                found, _ = helper.compute_rollout_correction_weights(p.old - p.rollout, p.mask, **fields)
                ours = batches[0].importance_weights
                assert ours is not None
                trained = p.mask.flatten() > 0
                name = f"weights, {level}, {threshold}{', normalised' if normalize else ''}"
                yield Comparison(name=name, difference=gap(ours[trained], found.flatten()[trained]))


def rejections(p: Padded) -> Iterator[Comparison]:
    """Rejection masks of each option."""
    from verl.trainer.ppo import rollout_corr_helper as helper

    def compare(option: str, threshold: str | float, reason: str = "") -> Comparison:
        cfg = CorrectionConfig(rollout_is=None, rollout_rs=option, rollout_rs_threshold=threshold)
        batches, _ = correct([p.packed()], [p.old.flatten()], cfg)
        theirs, _ = helper.compute_rollout_rejection_mask(p.old - p.rollout, p.mask, option, threshold)
        return Comparison(name=f"{option}, {threshold}", difference=gap(batches[0].trained_mask, theirs.flatten()), reason=reason)

    for option in RATIO_OPTIONS:
        yield compare(option, "0.8_1.25")
    inverted = "verl compares -log r with the logarithms of the bounds, which inverts the interval (its pull request 6377)"
    for option in RATIO_OPTIONS:
        yield compare(option, "0.5_1.1", inverted)
    for option in DIVERGENCE_OPTIONS:
        yield compare(option, 0.3 if "sum" not in option else 1.0)


def advantages(p: Padded) -> Iterator[Comparison]:
    """Group-relative and generalised advantages, and the value loss."""
    import numpy
    from verl.trainer.ppo import core_algos

    rewards = torch.zeros_like(p.mask)
    rewards[:, 0] = torch.tensor([1.0, 0.0, 0.3, 0.2, 0.9, 0.1], dtype=torch.float64)
    groups = [0, 0, 0, 1, 1, 1]
    theirs, _ = core_algos.compute_grpo_outcome_advantage(rewards, p.mask, numpy.array(groups))
    ours, _ = group_advantages(rewards[:, 0], torch.tensor(groups), normalize_by_std=True, eps=1e-6)
    yield Comparison(name="group advantages", difference=gap(ours[:, None] * p.mask, theirs))
    alone, _ = core_algos.compute_grpo_outcome_advantage(rewards, p.mask, numpy.arange(6))
    ours, _ = group_advantages(rewards[:, 0], torch.arange(6), normalize_by_std=True, eps=1e-6)
    single = "verl gives a group of one its reward as advantage; here it has none and counts as degenerate"
    yield Comparison(name="group of one", difference=gap(ours[:, None] * p.mask, alone), reason=single)
    values, gamma, lam = p.ref, torch.tensor(0.99), torch.tensor(0.95)
    theirs, returns = core_algos.compute_gae_advantage_return(rewards, values, p.mask, gamma, lam)
    batch = p.packed()
    ours, our_returns = generalized_advantages(
        rewards.flatten(), values.flatten(), batch.loss_mask, batch.cu_seqlens, gamma=float(gamma), lam=float(lam)
    )
    yield Comparison(name="GAE, whitened", difference=gap(whitened(ours, batch.loss_mask), theirs.flatten() * batch.loss_mask))
    yield Comparison(name="returns", difference=gap(our_returns, (returns * p.mask).flatten()))
    loss, _ = core_algos.compute_value_loss(p.log_probs, returns, values, p.mask, 0.2)
    mine = clipped_value_loss(p.log_probs, values, returns, clip=0.2)
    yield Comparison(name="value loss", difference=gap((mine * p.mask).sum() / p.mask.sum(), loss))


def metrics(p: Padded) -> Iterator[Comparison]:
    """Mismatch metrics under the shared names."""
    from verl.trainer.ppo import rollout_corr_helper as helper

    theirs = helper.compute_offpolicy_metrics(p.old, p.rollout, p.mask)
    batch = p.packed()
    ours = mismatch_metrics(batch.old_log_probs, batch.rollout_log_probs, batch.loss_mask, batch.cu_seqlens)
    for name, value in theirs.items():
        yield Comparison(name=f"rollout_corr/{name}", difference=abs(ours[f"rollout_corr/{name}"] - float(value)))


PEERS = {"verl": "tools.compare_with_peers", "trl": "tools.compare_with_trl"}
"""Module whose ``comparisons(seed)`` runs a peer."""


def comparisons(seed: int) -> list[Comparison]:
    """verl's, all of them on one random batch."""
    p = Padded.random(seed)
    return [c for part in (policy_losses, reinforce, divergences, weights, rejections, advantages, metrics) for c in part(p)]


def main() -> int:
    """Print the table; exit code 1 when one differs that is to agree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", choices=PEERS, action="append", help="default: both")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    chosen = args.peer or list(PEERS)
    missing = [peer for peer in chosen if importlib.util.find_spec(peer) is None]
    if missing:
        remedy = "install requirements/peers.txt as it says, or name another --peer"
        print(f"{', '.join(missing)} cannot be imported: {remedy}.", file=sys.stderr)
        return 2
    unexplained = 0
    for peer in chosen:
        print(f"{peer} {version(peer)}")
        for c in importlib.import_module(PEERS[peer]).comparisons(args.seed):
            differs = c.difference > TOLERANCE
            unexplained += differs and not c.reason
            print(f"  {c.name:45s} {c.difference:9.2e}  {c.reason or ('DIFFER' if differs else 'agree')}")
    print(f"{unexplained} unexplained")
    return int(unexplained > 0)


if __name__ == "__main__":
    sys.exit(main())
