"""The critic in the loop: generalised advantages of one step, and the critic's own update."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from e2e_fp8.config.root import Config
from e2e_fp8.correction.apply import joined_boundaries
from e2e_fp8.orchestration.ranks.loss_recipe import ValueLoss
from e2e_fp8.orchestration.shaping import kl_is_in_reward, mean_kl, punished_rewards, token_kl
from e2e_fp8.training.value_engine import ValueEngine
from e2e_fp8.types import PackedBatch, Sample, StepReport
from e2e_fp8.update.value import explained_variance, generalized_advantages, token_rewards, whitened


def with_gae(
    cfg: Config, samples: Sequence[Sample], batches: Sequence[PackedBatch], values: Sequence[torch.Tensor]
) -> tuple[list[PackedBatch], dict[str, float]]:
    """The batches with values, returns and advantages of every response token, in float64 until the end; metrics under verl's names.

    The response's reward is earned at its last trained token, also where it was cut off, and nothing is worth anything after that;
    a KL in the reward is paid at each token.
    """
    objective, critic = cfg.objective, cfg.objective.critic
    rewards, metrics = punished_rewards(cfg, samples)
    mask, boundaries = torch.cat([b.loss_mask.cpu() for b in batches]), joined_boundaries(batches)
    earned = token_rewards(rewards.double(), mask, boundaries)
    if kl_is_in_reward(cfg):
        kl = [token_kl(b, objective.kl_estimator) for b in batches]
        metrics |= mean_kl(kl, batches)
        earned = earned - objective.kl_coef * torch.cat([k.cpu().double() for k in kl])
    known = torch.where(mask > 0, torch.cat([v.cpu().double() for v in values]), 0.0)
    advantages, returns = generalized_advantages(earned, known, mask, boundaries, gamma=critic.gae_gamma, lam=critic.gae_lambda)
    if critic.whiten_advantages:
        advantages = whitened(advantages, mask)
    found = []
    sizes = [b.token_ids.numel() for b in batches]
    for batch, parts in zip(batches, zip(*(x.split(sizes) for x in (advantages, known, returns)), strict=True), strict=True):
        on_device = [part.to(batch.loss_mask) for part in parts]
        found.append(replace(batch, advantages=on_device[0], values=on_device[1], returns=on_device[2]))
    return found, metrics | _metrics(found, earned, boundaries)


def _metrics(batches: Sequence[PackedBatch], earned_T: torch.Tensor, boundaries: torch.Tensor) -> dict[str, float]:
    """verl's figures of one step: of tokens, and of ``critic/rewards`` over responses."""
    mask = torch.cat([b.loss_mask.cpu() for b in batches]) > 0
    advantages = torch.cat([b.advantages.cpu() for b in batches])[mask]
    values, returns = (torch.cat([getattr(b, n).cpu() for b in batches])[mask] for n in ("values", "returns"))
    rewards = torch.stack([part.sum() for part in earned_T.split(boundaries.diff().tolist())])
    record = {"critic/vf_explained_var": explained_variance(returns, values)}
    for name, numbers in (("values", values), ("returns", returns), ("advantages", advantages), ("rewards", rewards)):
        record |= {f"critic/{name}/{k}": float(f(numbers)) for k, f in (("mean", torch.mean), ("max", torch.amax), ("min", torch.amin))}
    return record


def update_critic(critic: ValueEngine, minibatches: Sequence[list[PackedBatch]], cfg: Config) -> dict[str, float]:
    """One optimizer step of the critic per mini-batch, by the mean over its response tokens, and the metrics of all.

    The correction of the policy's loss plays no part: a return is a return of the policy that sampled, whatever its ratio.
    """
    loss_fn = ValueLoss(critic=cfg.objective.critic)
    critic.set_learning_rate(cfg.objective.critic.learning_rate)
    reports: list[StepReport] = []
    for part in minibatches:
        tokens = float(sum(b.loss_mask.sum() for b in part))
        if tokens:
            reports.append(critic.train_step(part, loss_fn, tokens))
    record = {"critic/lr": cfg.objective.critic.learning_rate, "critic/skipped_steps": float(sum(r.skipped for r in reports))}
    if reports:
        names = [n for n in reports[0].metrics if n != "loss"]
        record |= {name: sum(r.metrics[name] for r in reports) / len(reports) for name in names}
        record["critic/grad_norm"] = max(r.grad_norm for r in reports)
    return record
