"""Losses, corrections and advantages on random batches, ours beside TRL's, for ``compare_with_peers.py``.

TRL has its formulas inside methods of its trainer. The loss method is run as it is, on an object with the attributes that it reads; the
importance weights and advantages, which are statements in the middle of a method of 600 lines, are taken from its source and run.
"""
# pyright: reportMissingImports=false

import ast
import inspect
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import grpo_trainer

from e2e_fp8.config.correction import CorrectionConfig
from e2e_fp8.config.objective import Aggregation, ObjectiveConfig
from e2e_fp8.correction.apply import correct
from e2e_fp8.update.advantages import group_advantages
from tools.compare_with_peers import Comparison, Padded, gap, our_loss, with_gradient

WEIGHTS = "self.use_vllm and self.vllm_importance_sampling_correction"
ADVANTAGES = "self.multi_objective_aggregation == 'sum_then_normalize'"


class Accelerator:
    """What the loss asks of accelerate's class, for one process."""

    num_processes = 1

    def gather(self, value: torch.Tensor) -> torch.Tensor:
        """Of the only process."""
        return value

    def reduce(self, value: torch.Tensor, reduction: str) -> torch.Tensor:
        """The same."""
        return value


class Losses(GRPOTrainer):
    """The trainer without a model: its forward gives the log-probs it is handed."""

    def __init__(self, p: Padded, **config: Any) -> None:
        fixed = {"output_dir": "unused", "use_cpu": True, "bf16": False, "report_to": [], "steps_per_generation": 1}
        args = GRPOConfig(**{**fixed, "epsilon": 0.2, **config})
        for name in ("loss_type", "beta", "importance_sampling_level", "top_entropy_quantile", "off_policy_mask_threshold", "use_vllm"):
            setattr(self, name, getattr(args, name))
        for name in ("correction", "mode", "clip_max", "clip_min"):
            setattr(self, f"vllm_importance_sampling_{name}", getattr(args, f"vllm_importance_sampling_{name}"))
        self.args, self.p, self.accelerator, self.model = args, p, Accelerator(), SimpleNamespace(training=True)
        self.epsilon_low, self.epsilon_high = args.epsilon, args.epsilon_high if args.epsilon_high is not None else args.epsilon
        self.max_completion_length = p.mask.shape[1]
        self.current_gradient_accumulation_steps = 1
        self.aux_loss_enabled = self._entropy_bonus_enabled = False
        self._metrics = {"train": defaultdict(list)}

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        return model, torch.zeros_like(model), None

    def value(self, log_probs: torch.Tensor, weights: torch.Tensor | None = None, tokens: torch.Tensor | None = None) -> torch.Tensor:
        """TRL's loss of the batch under these log-probs ``[B, R]``; ``tokens`` are those of the whole optimizer step."""
        p, blank = self.p, torch.zeros(len(self.p.mask), 1)
        inputs = {
            "prompt_ids": blank,
            "prompt_mask": blank,
            "completion_ids": torch.zeros_like(p.mask),
            "completion_mask": p.mask,
            "advantages": p.advantages[:, 0],
            "old_per_token_logps": p.old,
            "ref_per_token_logps": p.ref,
            "num_items_in_batch": p.mask.sum() if tokens is None else tokens,
            "importance_sampling_ratio": weights,
        }
        return self._compute_loss(log_probs, inputs)


def statement(test: str) -> Any:
    """The first ``if`` with this test in the method that prepares a batch, compiled."""
    source = textwrap.dedent(inspect.getsource(GRPOTrainer._generate_and_score_completions))
    found = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.If) and ast.unparse(n.test) == test]
    if not found:
        raise RuntimeError(f"TRL has no statement 'if {test}' any more: bring tools/compare_with_trl.py up to its version.")
    first = min(found, key=lambda n: n.lineno)
    return compile(ast.Module(body=[first], type_ignores=[]), "trl", "exec")


def importance_weights(p: Padded, **config: Any) -> torch.Tensor:
    """TRL's weights between old and rollout policy: ``[B, R]`` or ``[B, 1]``."""
    names = {
        "self": Losses(p, use_vllm=True, **config),
        "completion_mask": p.mask,
        "tool_mask": None,
        "old_per_token_logps": p.old,
        "sampling_per_token_logps": p.rollout,
    }
    exec(statement(WEIGHTS), {**vars(grpo_trainer)}, names)
    ratio = names["vllm_importance_sampling_ratio"]
    assert isinstance(ratio, torch.Tensor)
    return ratio


def policy_losses(p: Padded) -> Iterator[Comparison]:
    """Each loss type beside the objective and aggregation that it stands for."""

    def compare(name: str, objective: ObjectiveConfig, reason: str = "", **config: Any) -> Comparison:
        fields = {"epsilon_high": objective.clip_high, **config}
        theirs = with_gradient(Losses(p, **fields).value, p.log_probs)
        ours = with_gradient(our_loss(p.packed(), objective), p.log_probs)
        return Comparison(peer="trl", name=name, difference=gap(ours, theirs), reason=reason)

    aggregations: tuple[tuple[str, Aggregation], ...] = (
        ("grpo", "seq-mean-token-mean"),
        ("bnpo", "token-mean"),
        ("dapo", "token-mean"),
        ("dr_grpo", "seq-mean-token-sum-norm"),
    )
    for loss_type, mode in aggregations:
        yield compare(f"{loss_type} = {mode}", ObjectiveConfig(loss_agg_mode=mode), loss_type=loss_type)
    yield compare("dapo, delta 3 = dual clip", ObjectiveConfig(kind="ppo"), loss_type="dapo", delta=3.0)
    sequence = {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4}
    yield compare("sequence level = gspo", ObjectiveConfig(kind="gspo"), **sequence)
    cispo = ObjectiveConfig(kind="cispo")
    yield compare("cispo, epsilon_high 1 + clip_high", cispo, loss_type="cispo", epsilon_high=1 + cispo.clip_high)
    absolute = "TRL's epsilon_high is the largest weight itself for CISPO, ours and verl's is its distance from 1"
    yield compare("cispo, epsilon_high clip_high", cispo, absolute, loss_type="cispo", epsilon_high=cispo.clip_high)
    yield compare("sapo", ObjectiveConfig(kind="sapo"), loss_type="sapo")
    with_kl, plain = ObjectiveConfig(kl_coef=0.1), {"loss_type": "dapo", "beta": 0.1}
    yield compare("dapo with beta = KL k3", with_kl, **plain, use_bias_correction_kl=False)
    weighted = "by default TRL weighs the KL by the ratio (use_bias_correction_kl); verl and ours have k3+ for an unbiased gradient"
    yield compare("dapo with beta, default", with_kl, weighted, **plain)


def accumulation(p: Padded) -> Iterator[Comparison]:
    """Two micro-batches of one optimizer step: whose denominator is it."""
    parts = (slice(0, 2), slice(2, None))

    def theirs(loss_type: str) -> torch.Tensor:
        trainers = [Losses(Padded(**{n: v[rows] for n, v in vars(p).items()}), loss_type=loss_type, epsilon_high=0.28) for rows in parts]
        for trainer in trainers:
            trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation = 2

        def step(log_probs: torch.Tensor) -> torch.Tensor:
            values = [t.value(log_probs[rows], tokens=p.mask.sum()) for t, rows in zip(trainers, parts, strict=True)]
            return torch.stack(values).sum()

        return with_gradient(step, p.log_probs)

    divided: tuple[tuple[str, Aggregation, str], ...] = (
        ("dapo", "token-mean", ""),
        ("bnpo", "token-mean", "TRL's bnpo averages each micro-batch's own token mean; one denominator for the optimizer step here"),
        ("grpo", "seq-mean-token-mean", "TRL's grpo weighs micro-batches alike whatever number of sequences they hold"),
    )
    for loss_type, mode, reason in divided:
        ours = with_gradient(our_loss(p.packed(), ObjectiveConfig(loss_agg_mode=mode)), p.log_probs)
        yield Comparison(peer="trl", name=f"{loss_type}, micro-batches of 2 and 4", difference=gap(ours, theirs(loss_type)), reason=reason)


def weights(p: Padded) -> Iterator[Comparison]:
    """TIS and MIS per token and per sequence, and a whole loss under them."""
    trained = p.mask.flatten() > 0

    def ours(**config: Any) -> torch.Tensor:
        batches, _ = correct([p.packed()], [p.old.flatten()], CorrectionConfig(**config))
        found = batches[0].importance_weights
        assert found is not None
        return found

    for level in ("token", "sequence"):
        for mode, ours_mode in (("truncate", "truncate"), ("mask", "mask")):
            theirs = importance_weights(
                p, vllm_importance_sampling_mode=f"{level}_{mode}", vllm_importance_sampling_clip_max=2.0
            ).expand_as(p.mask)
            mine = ours(rollout_is=level, rollout_is_threshold=2.0, rollout_is_mode=ours_mode)
            yield Comparison(peer="trl", name=f"weights, {level}_{mode}", difference=gap(mine[trained], theirs.flatten()[trained]))
        for mode, ours_mode in (("truncate", "clip"), ("mask", "mask")):
            bounds = {"vllm_importance_sampling_clip_min": 0.5, "vllm_importance_sampling_clip_max": 5.0}
            theirs = importance_weights(p, vllm_importance_sampling_mode=f"{level}_{mode}", **bounds).expand_as(p.mask)
            mine = ours(rollout_is=level, rollout_is_threshold="0.5_5.0", rollout_is_mode=ours_mode)
            name = f"weights, {level}_{mode}, 0.5 to 5 = {ours_mode}"
            yield Comparison(peer="trl", name=name, difference=gap(mine[trained], theirs.flatten()[trained]))
    config = CorrectionConfig(rollout_is="token", rollout_is_threshold=2.0)
    batches, _ = correct([p.packed()], [p.old.flatten()], config)
    theirs = importance_weights(p, vllm_importance_sampling_mode="token_truncate", vllm_importance_sampling_clip_max=2.0)
    trainer = Losses(p, loss_type="dapo", epsilon_high=0.28, beta=0.1, use_bias_correction_kl=False, use_vllm=True)
    value = with_gradient(lambda lp: trainer.value(lp, theirs), p.log_probs)
    mine = with_gradient(our_loss(batches[0], ObjectiveConfig(kl_coef=0.1), config), p.log_probs)
    yield Comparison(peer="trl", name="dapo with token TIS and KL", difference=gap(mine, value))
    torn = Padded(**{**vars(p), "rollout": torch.where(p.mask > 0, torch.nan, p.rollout)})
    theirs = importance_weights(torn, vllm_importance_sampling_mode="token_truncate")
    batches, _ = correct([torn.packed()], [torn.old.flatten()], CorrectionConfig())
    found = batches[0].importance_weights
    assert found is not None
    hidden = "TRL gives a token without a rollout log-prob the weight 1; here a nan stays to be seen"
    yield Comparison(peer="trl", name="weights of nan", difference=gap(found[trained], theirs.flatten()[trained]), reason=hidden)


def advantages(p: Padded) -> Iterator[Comparison]:
    """Group-relative advantages, and their epsilon."""
    rewards = torch.tensor([1.0, 0.0, 0.3, 0.2, 0.9, 0.1], dtype=torch.float64)
    groups = torch.tensor([0, 0, 0, 1, 1, 1])

    def theirs(scale_rewards: str) -> torch.Tensor:
        names: dict[str, Any] = {
            "self": SimpleNamespace(
                multi_objective_aggregation="sum_then_normalize", scale_rewards=scale_rewards, reward_weights=torch.ones(1).double()
            ),
            "rewards_per_func": rewards[:, None],
            "unscorable_mask": torch.zeros(6, dtype=torch.bool),
            "num_generations": 3,
            "device": "cpu",
        }
        exec(statement(ADVANTAGES), {**vars(grpo_trainer)}, names)
        return names["advantages"]

    for name, scale, eps, reason in (
        ("group advantages, eps 1e-4", "group", 1e-4, ""),
        ("group advantages without std", "none", 1e-4, ""),
        ("group advantages, default eps", "group", 1e-6, "TRL adds 1e-4 to the standard deviation, verl and ours 1e-6"),
    ):
        ours, _ = group_advantages(rewards, groups, normalize_by_std=scale == "group", eps=eps)
        yield Comparison(peer="trl", name=name, difference=gap(ours, theirs(scale)), reason=reason)


def comparisons(seed: int) -> list[Comparison]:
    """All of them on one random batch."""
    p = Padded.random(seed)
    return [c for part in (policy_losses, accumulation, weights, advantages) for c in part(p)]
