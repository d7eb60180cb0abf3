"""Causes that no choice of operators closes, each opened alone on the bitwise baseline (e2e_fp8.config.alignment_explain.WHAT_IF)."""

from collections.abc import Callable

import torch

from e2e_fp8.alignment.explain import Explainer, Explanation, Row, Scores, where_finite
from e2e_fp8.config.alignment_explain import WHAT_IF, with_numerics
from e2e_fp8.config.root import Config
from e2e_fp8.errors import ConfigError
from e2e_fp8.numerics.blockwise import BlockScaled, dequantize_blockwise
from e2e_fp8.observability.timers import PhaseTimer
from e2e_fp8.orchestration.ranks.loss_recipe import PolicyLoss
from e2e_fp8.orchestration.rl_step import optimizer_step
from e2e_fp8.orchestration.scoring import score
from e2e_fp8.orchestration.session import Session
from e2e_fp8.orchestration.weight_sync import exported_tensors
from e2e_fp8.training.engine import MegatronEngine
from e2e_fp8.update.aggregation import loss_denominator

NOT_MEASURED = {
    "parallel_sums": "trainer and engine are of one rank each here, whatever ranks trained a run",
    "router_replay": "replay hides the router's part of the mismatch, so it is off here",
}
"""Causes of a mismatch elsewhere -> why there is no row on either ground."""
ON_THE_CPU = {
    "gemm_triton": "both sides call one implementation of the FP8 products with exact block sums on the CPU",
    "gemm_cutlass": "both sides call one implementation of the FP8 products with exact block sums on the CPU",
    "moe_backend": "vLLM's own FP8 experts do not run on the CPU",
}
COMPILED = (
    "the engine ran without compilation and CUDA graphs, which keep their operators and which rollout.enforce_eager false allows; graphs "
    "change no bit (docs/alignment.md), what compilation fuses is in no row"
)
TOP_P = 0.95


class WhatIf:
    """The rows beside the table of operators."""

    def __init__(self, explainer: Explainer) -> None:
        self.on, self.cfg = explainer, explainer.cfg
        self.base = explainer.trainer_with(explainer.shared)
        self.ours, self.engine = explainer.trainer_scores(self.base), explainer.engine_scores(explainer.shared)

    def add(self, found: Explanation) -> None:
        """All rows, or the reason why one is missing."""
        found.not_measured |= NOT_MEASURED
        on_gpu = self.on.engine.device == "cuda"
        if on_gpu and not self.cfg.rollout.enforce_eager:
            found.not_measured["compilation"] = COMPILED
        measures: dict[str, Callable[[], Row | str]] = {
            "training_in_bf16": self.training_in_bf16,
            "activation_quantization": self.activation_quantization,
            "weight_quantization": self.weight_quantization,
            "activation_scale_format": self.activation_scale_format,
            "weight_scale_format": self.weight_scale_format,
            "gemm_triton": lambda: self.swapped_products("gemm_triton"),
            "gemm_cutlass": lambda: self.swapped_products("gemm_cutlass"),
            "moe_backend": self.moe_backend,
            "kv_precision": self.kv_precision,
            "sampling_temperature": self.sampling_temperature,
            "sampling_top_p": self.sampling_top_p,
            "staleness": self.staleness,
        }
        assert measures.keys() == WHAT_IF.keys()
        for name, measure in measures.items():
            if name in ON_THE_CPU and not on_gpu:
                found.not_measured[name] = ON_THE_CPU[name]
            else:
                self.on.attempt(found, name, measure)

    def _row(self, name: str, group: str, ours: Scores, theirs: Scores | None = None, *, detail: str = "") -> Row:
        kind = "cause" if name == "training_in_bf16" and self.cfg.numerics.training_precision == "bf16" else "what_if"
        return self.on.row(name, group, kind, WHAT_IF[name] + detail, ours, self.engine if theirs is None else theirs)

    def training_in_bf16(self) -> Row:
        """The trainer in BF16 on its masters, the engine in FP8."""
        return self._row("training_in_bf16", "quantization", self.on.trainer_scores(self.base, high_precision=True))

    def activation_quantization(self) -> Row:
        """The trainer in BF16 on the engine's weights."""
        return self._row("activation_quantization", "quantization", self._on_dequantized())

    def weight_quantization(self) -> Row:
        """Two trainers in BF16, on the engine's weights and on the masters."""
        masters = self.on.trainer_scores(self.base, high_precision=True)
        return self._row("weight_quantization", "quantization", self._on_dequantized(), Scores(log_probs=masters.log_probs))

    def _on_dequantized(self) -> Scores:
        """BF16 products of bf16(codes x scales): 2^-9 of rounding beside E4M3's 2^-4."""
        trainer = self.on.trainer_with(self.on.shared)
        trainer.load_hf_weights(dequantized(self.base, self.base.cfg))
        return self.on.trainer_scores(trainer, high_precision=True)

    def activation_scale_format(self) -> Row | str:
        """The trainer's activations with scales of the other format."""
        return self._other_scales("activation_scale_format", self.cfg.numerics.activation_power_2_scale)

    def weight_scale_format(self) -> Row | str:
        """The trainer's weights with scales of the other format, the engine's as they were published."""
        return self._other_scales("weight_scale_format", self.cfg.numerics.weight_power_2_scale)

    def _other_scales(self, field: str, power_2_scale: bool) -> Row | str:
        numerics, other = self.cfg.numerics, "fp32" if power_2_scale else "pow2"
        formats = {
            "activation_scale_format": "pow2" if numerics.activation_power_2_scale else "fp32",
            "weight_scale_format": "pow2" if numerics.weight_power_2_scale else "fp32",
        }
        cfg = with_numerics(self.cfg, self.on.shared, training_precision="fp8", **(formats | {field: other}))
        if self.on.engine.device == "cuda" and cfg.numerics.any_fp32_scale != numerics.any_fp32_scale:
            return "Transformer Engine reads NVTE_FP8_BLOCK_SCALING_FP32_SCALES once, and this row needs its other value"
        return self._row(field, "scale format", self.on.trainer_scores(self.on.trainer_of(cfg)), detail=f": {other} there")

    def swapped_products(self, name: str) -> Row:
        """The engine's FP8 products by another implementation."""
        from e2e_fp8.rollout.swapped_kernels import PRODUCTS, swapped_products

        theirs = self.on.engine_scores(self.on.shared, lambda model: swapped_products(model, PRODUCTS[name]))
        return self._row(name, "GEMM backend", self.ours, theirs)

    def moe_backend(self) -> Row | str:
        """The engine's experts by vLLM's own layer."""
        if not self.cfg.model.is_moe:
            return "this model has no experts"
        from e2e_fp8.rollout.swapped_kernels import own_experts

        return self._row("moe_backend", "MoE backend", self.ours, self.on.engine_scores(self.on.shared, own_experts))

    def kv_precision(self) -> Row:
        """The engine's keys and values rounded to E4M3 before they enter the cache."""
        from e2e_fp8.rollout.swapped_kernels import rounded_cache

        return self._row("kv_precision", "attention", self.ours, self.on.engine_scores(self.on.shared, rounded_cache))

    def sampling_top_p(self) -> Row | str:
        """The engine's log-probs of the truncated distribution, where it has one."""
        theirs = self.on.engine_scores(self.on.shared, top_p=TOP_P)
        ours, kept, left_out = where_finite(self.ours, theirs)
        if left_out == 1:
            return f"every sampled token is outside of top-p {TOP_P}"
        return self._row("sampling_top_p", "sampling", ours, kept, detail=f": {TOP_P}, {100 * left_out:.2g} % of the tokens outside")

    def sampling_temperature(self) -> Row:
        """The trainer's log-probs at 1, or at 0.9 where 1 is the temperature."""
        sampled = self.cfg.rollout.temperature
        other = 0.9 if sampled == 1.0 else 1.0
        rollout = self.cfg.rollout.model_copy(update={"temperature": other})
        trainer = self.on.trainer_of(self.base.cfg.model_copy(update={"rollout": rollout}))
        return self._row(
            "sampling_temperature", "sampling", self.on.trainer_scores(trainer), detail=f", {other:g} instead of {sampled:g}"
        )  # fmt: skip

    def staleness(self) -> Row | str:
        """One optimizer step of the run's objective on these samples."""
        objective = self.cfg.objective
        if objective.advantage != "group" or objective.kl_coef:
            return "the step needs group advantages without a KL term here (objective.advantage, objective.kl_coef)"
        trainer = self.on.trainer_with(self.on.shared)
        trainer.load_state_dict(self.on.state)
        trainer.set_learning_rate(self.cfg.training.learning_rate)
        session = Session(cfg=self.cfg, task=self.on.session.task, trainer=trainer, model_dir=self.on.session.model_dir)
        (part,) = score(session, self.on.samples, PhaseTimer()).minibatches
        if not any(bool(b.advantages.any()) for b in part):
            return "the rewards of every group are equal, so a step has no gradient"
        loss_fn = PolicyLoss(objective=objective, correction=self.cfg.correction, max_response_tokens=self.cfg.rollout.max_response_tokens)
        report = optimizer_step(trainer, part, loss_fn, loss_denominator(part, objective.loss_agg_mode))
        if report.skipped:
            return "the optimizer skipped the step"
        detail = f" (learning rate {self.cfg.training.learning_rate:g}, {len(self.on.samples)} samples)"
        return self._row("staleness", "staleness", self.on.trainer_scores(trainer), detail=detail)


def dequantized(trainer: MegatronEngine, cfg: Config) -> dict[str, torch.Tensor]:
    """HF name -> float32 ``[N, K]`` of the FP8 weights as the engine multiplies them, and the other weights as they are.

    Raises:
        ConfigError: no weight is in FP8.
    """
    tensors = {t.name: t.tensor for t in exported_tensors(trainer, cfg)}
    suffix = "_scale_inv"
    inverse = {name.removesuffix(suffix): t for name, t in tensors.items() if name.endswith(suffix)}
    if not inverse:
        raise ConfigError("No weight of the trainer is in FP8, so nothing can be dequantized: set numerics.training_precision to fp8.")
    found = {name: t for name, t in tensors.items() if not name.endswith(suffix)}
    return found | {name: dequantize_blockwise(BlockScaled(found[name], scales, "128x128")) for name, scales in inverse.items()}
