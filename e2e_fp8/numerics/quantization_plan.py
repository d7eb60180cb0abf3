"""Which modules are FP8 and how: one plan, read by training, export and rollout. No torch here."""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from e2e_fp8.config.model import ModelConfig
from e2e_fp8.config.root import Config
from e2e_fp8.config.validation import BLOCK, linear_modules


@dataclass(frozen=True, kw_only=True)
class QuantizationPlan:
    """Formats, scale kind and high-precision modules of both sides."""

    training_fp8: bool
    rollout_fp8: bool
    power_2_scale: bool
    """Of activations and gradients (1x128 and 128x1 tiles)."""
    weight_power_2_scale: bool
    """Of weights (128x128 tiles)."""
    forward_format: str
    backward_format: str
    amax_epsilon: float
    high_precision_modules: tuple[str, ...]

    @classmethod
    def from_config(cls, cfg: Config) -> "QuantizationPlan":
        """The plan of a configuration."""
        numerics = cfg.numerics
        return cls(
            training_fp8=numerics.training_precision == "fp8",
            rollout_fp8=numerics.rollout_precision == "fp8",
            power_2_scale=numerics.activation_power_2_scale,
            weight_power_2_scale=numerics.weight_power_2_scale,
            forward_format=numerics.forward_format,
            backward_format=numerics.backward_format,
            amax_epsilon=numerics.amax_epsilon,
            high_precision_modules=numerics.high_precision_modules,
        )

    def is_fp8(self, hf_module: str) -> bool:
        """Whether the weight of ``hf_module`` is block FP8. Patterns match the whole name: ``*.mlp.gate`` is not ``mlp.gate_proj``."""
        return not any(fnmatchcase(hf_module, pattern) for pattern in self.high_precision_modules)

    def ignored_layers(self, model: ModelConfig) -> list[str]:
        """Exact names of the linear modules kept in high precision, for vLLM's ``modules_to_not_convert``."""
        return [name for name, _, _ in hf_linear_modules(model) if not self.is_fp8(name)]

    def hf_quantization_config(self, model: ModelConfig) -> dict[str, Any]:
        """``quantization_config`` of an HF config.json."""
        return {
            "quant_method": "fp8",
            "fmt": self.forward_format,
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": self.ignored_layers(model),
        }


def hf_linear_modules(model: ModelConfig) -> list[tuple[str, int, int]]:
    """(HF module name, out_features, in_features) of every linear module, router and ``lm_head`` included."""
    return list(linear_modules(model))
