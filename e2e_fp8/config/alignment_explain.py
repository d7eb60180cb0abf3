"""What ``e2e-fp8 align explain`` runs and reports for each cause, and the thresholds that a configuration may set. Torch-free."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from e2e_fp8.config.alignment import CAUSES, check_alignment, choices_at
from e2e_fp8.config.training import ParallelConfig
from e2e_fp8.errors import ConfigError

if TYPE_CHECKING:
    from e2e_fp8.config.root import Config

METRICS = ("mismatch_kl", "abs_mean", "abs_max", "tme", "tme_max", "ratio_above_2", "changed_experts")
"""Of the tokens of one row. With d = lp_train - lp_rollout: ``mismatch_kl`` k3, mean(exp(d) - d - 1); ``abs_*`` of |d|, in nats; ``tme``
NeMo-RL's token_mult_prob_error, mean(exp |d|), and ``tme_max`` its largest token; ``ratio_above_2`` the share of tokens whose probabilities
differ by more than a factor of 2, either way; ``changed_experts`` the share of the engine's choices that the trainer would not have made,
over all layers (absent in a dense model)."""
BASELINE, TOTAL = "baseline", "total"
WHAT_IF: dict[str, str] = {
    "training_in_bf16": "trainer multiplies bf16(FP32 master) in BF16: what rollout-only FP8 leaves of weights and activations",
    "activation_quantization": "trainer multiplies the engine's dequantized weights in BF16: activations alone are quantized on one side",
    "weight_quantization": "trainer against itself, both with BF16 products: dequantized FP8 weights against bf16(FP32 master)",
    "activation_scale_format": "trainer rounds scales of activations the other way (fp32 or pow2)",
    "weight_scale_format": "trainer rounds scales of weights the other way, the engine has those that were published",
    "gemm_triton": "engine's FP8 products, of experts too, by vLLM's Triton kernel in place of DeepGEMM",
    "gemm_cutlass": "engine's FP8 products, of experts too, by CUTLASS in place of DeepGEMM",
    "moe_backend": "engine's experts by vLLM's own layer: quantizer, products (Triton for few tokens), SwiGLU and combine together",
    "kv_precision": "engine's keys and values rounded to E4M3, as in an FP8 cache with scale 1",
    "sampling_temperature": "trainer's log-probs at another temperature",
    "sampling_top_p": "engine's log-probs of the distribution truncated by top-p, for the tokens in it",
    "staleness": "engine one optimizer step behind",
}
"""Causes that no operator choice closes; each is measured on top of the bitwise baseline, and is no part of the sum."""
GROUPS: dict[str, str] = {
    "rms_norm": "norms",
    "residual_add": "norms",
    "qk_norm": "norms",
    "final_norm": "norms",
    "rotary": "attention",
    "attention": "attention",
    "swiglu": "MLP",
    "router_gemm": "router",
    "top_k": "router",
    "gate_normalization": "router",
    "router_probabilities": "MoE combine",
    "combine": "MoE combine",
    "head": "head",
    "log_softmax": "log-probs",
    "temperature": "log-probs",
    "activation_scales": "scale format",
}
"""Cause of the operator table -> the part of the model that it belongs to."""


def check_alignment_gates(cfg: "Config") -> None:
    """Raise ConfigError for a gate that names nothing that is measured, or whose threshold nothing can meet."""
    rows = (BASELINE, TOTAL, *CAUSES, *WHAT_IF)
    for gate, threshold in cfg.numerics.alignment_gates.items():
        row, metric = parsed(gate)
        if row not in rows:
            raise ConfigError(f"numerics.alignment_gates names {row!r}, but align explain reports {', '.join(rows)}: use one of these.")
        if metric not in METRICS:
            raise ConfigError(
                f"numerics.alignment_gates.{gate} asks for {metric!r}, but the metrics are {', '.join(METRICS)}: use one of these."
            )
        if not (math.isfinite(threshold) and threshold >= 0):
            raise ConfigError(f"numerics.alignment_gates.{gate} is {threshold}, but a threshold is a finite number of at least 0.")


def parsed(gate: str) -> tuple[str, str]:
    """``(row, metric)`` of ``ROW`` or ``ROW.METRIC``; a row alone means its mismatch KL."""
    row, _, metric = gate.partition(".")
    return row, metric or METRICS[0]


def violations(gates: Mapping[str, float], measured: Mapping[str, Mapping[str, float]], reasons: Mapping[str, str]) -> list[str]:
    """One sentence for each gate that ``measured`` (row -> metric -> value) exceeds or cannot answer; ``reasons`` say why a row is absent.

    A value that is not a number exceeds every gate.
    """
    found = []
    for gate, threshold in gates.items():
        row, metric = parsed(gate)
        value = measured.get(row, {}).get(metric)
        if value is None:
            why = reasons.get(row, "this model has no such cause" if row not in measured else f"{metric} is not measured for it")
            found.append(f"numerics.alignment_gates.{gate} cannot be judged, because {why}: remove the gate or measure {row}.")
        elif not value <= threshold:
            found.append(f"numerics.alignment_gates.{gate} is exceeded: {row} has {metric} {value:.3g}, above {threshold:.3g}.")
    return found


def explain_config(cfg: "Config", *, one_rank: bool = False) -> "Config":
    """The configuration as ``align explain`` runs it; with ``one_rank``, the weights of a run of several trainer ranks in one process.

    Raises:
        ConfigError: the causes cannot be switched in it.
    """
    if cfg.rollout.placement != "in_process":
        raise ConfigError(
            "rollout.placement is server, but align explain switches operators of a live engine: set it to in_process and "
            "sync.transport to local."
        )
    if cfg.run.backend == "cuda" and cfg.model.is_moe and cfg.rollout.moe_backend != "deep_gemm":
        raise ConfigError(
            f"rollout.moe_backend is {cfg.rollout.moe_backend}, but the bitwise baseline of align explain needs the trainer's grouped "
            "products: set it to deep_gemm; the row gemm_triton says what Triton's add."
        )
    if cfg.numerics.rollout_precision != "fp8":
        raise ConfigError(
            "numerics.rollout_precision is bf16, but the bitwise baseline of align explain needs FP8 products in the engine: set it to fp8."
        )
    training = cfg.training.model_copy(
        update={"router_replay": cfg.training.router_replay.model_copy(update={"mode": "disabled"}), "minibatches_per_step": 1}
    )
    if one_rank:
        training = training.model_copy(update={"parallel": ParallelConfig()})
    rollout = cfg.rollout.model_copy(update={"sleep_level": 0})
    sync = cfg.sync.model_copy(update={"transport": "local"})
    cfg = cfg.model_copy(update={"training": training, "rollout": rollout, "sync": sync})
    check_alignment(with_numerics(cfg, choices_at("bitwise"), training_precision="fp8"))
    return cfg


def with_numerics(cfg: "Config", choices: Mapping[str, str], **numerics: Any) -> "Config":
    """``cfg`` with exactly these operators (cause -> choice) and fields of ``numerics``."""
    changed = {"alignment": "bitwise", "alignment_overrides": dict(choices), **numerics}
    return cfg.model_copy(update={"numerics": cfg.numerics.model_copy(update=changed)})
