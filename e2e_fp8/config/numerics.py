"""Number formats: the one place where scale kind and formats are chosen, for trainer and engine alike."""

from typing import Literal

from pydantic import Field

from e2e_fp8.config.alignment import Level
from e2e_fp8.config.base import Section


class NumericsConfig(Section):
    """FP8 recipe. Blocks are 1x128 for activations and gradients and 128x128 for weights."""

    training_precision: Literal["fp8", "bf16"] = Field(default="fp8", description="Linear layers of the trainer: block FP8 or BF16.")
    rollout_precision: Literal["fp8", "bf16"] = Field(
        default="fp8", description="Linear layers of the rollout engine: block FP8 W8A8 or BF16."
    )
    scale_format: Literal["fp32", "pow2"] = Field(
        default="fp32", description="Rounding of block scales on both sides: exact FP32 or powers of two."
    )
    weight_scale_format: Literal["fp32", "pow2"] | None = Field(
        default=None, description="Rounding of the 128x128 scales of weights; null takes scale_format."
    )
    activation_scale_format: Literal["fp32", "pow2"] | None = Field(
        default=None, description="Rounding of the 128-wide scales of activations and gradients; null takes scale_format."
    )
    forward_format: Literal["e4m3"] = Field(default="e4m3", description="Format of weights and activations in the forward pass.")
    backward_format: Literal["e5m2", "e4m3"] = Field(default="e5m2", description="Format of output gradients; e5m2 is the hybrid recipe.")
    amax_epsilon: float = Field(default=0.0, ge=0, description="Smallest tile amax before division; 0 as Transformer Engine's default.")
    high_precision_modules: tuple[str, ...] = Field(
        default=("lm_head", "model.embed_tokens", "model.norm", "*.mlp.gate", "*norm"),
        description="HF module names (anchored globs: the whole name must match) kept in BF16 on both sides.",
    )
    router_precision: Literal["mixed", "bf16", "fp32", "fp8"] = Field(
        default="mixed",
        description="Product of a router's BF16 weights with its input. bf16, fp32 and fp8 (quantized as any linear, tiles padded) hold on "
        "both sides; mixed is FP32 in the trainer and BF16 in the engine, the usual settings of Megatron-Core and vLLM.",
    )
    head_dtype: Literal["float32"] = Field(default="float32", description="Precision of the logits on both sides.")
    alignment: Level = Field(
        default="fast",
        description="How far trainer and engine agree: fast, own operators; aligned, shared ones where they cost little; bitwise, "
        "equal log-probs for every sampled token in any batch (docs/alignment.md).",
    )
    alignment_overrides: dict[str, str] = Field(
        default={}, description="Single causes set apart from the level, as cause: choice; for studies. docs/alignment.md lists both."
    )
    alignment_gates: dict[str, float] = Field(
        default={},
        description="Thresholds of `e2e-fp8 align explain`, as ROW: mismatch KL or ROW.METRIC: value; exit code 1 above one. "
        "docs/alignment.md lists rows and metrics.",
    )

    @property
    def weight_power_2_scale(self) -> bool:
        """Whether scales of weights are powers of two."""
        return (self.weight_scale_format or self.scale_format) == "pow2"

    @property
    def activation_power_2_scale(self) -> bool:
        """Whether scales of activations and gradients are powers of two."""
        return (self.activation_scale_format or self.scale_format) == "pow2"

    @property
    def ungated(self) -> "NumericsConfig":
        """Without thresholds, which change no number of a run."""
        return self.model_copy(update={"alignment_gates": {}})

    @property
    def any_fp32_scale(self) -> bool:
        """Whether any operand has FP32 scales, which Transformer Engine allows only under a switch of its environment."""
        return not (self.weight_power_2_scale and self.activation_power_2_scale)
