"""Which modules are FP8 and how: one plan, read by training, export and rollout. No torch here."""

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from e2e_fp8.config.model import ModelConfig
from e2e_fp8.config.root import Config

_EDGE = 128


@dataclass(frozen=True, kw_only=True)
class QuantizationPlan:
    """Formats, scale kind and high-precision modules of both sides."""

    training_fp8: bool
    rollout_fp8: bool
    power_2_scale: bool
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
            power_2_scale=numerics.scale_format == "pow2",
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
            "weight_block_size": [_EDGE, _EDGE],
            "modules_to_not_convert": self.ignored_layers(model),
        }

    def misaligned(self, model: ModelConfig) -> list[str]:
        """FP8 modules with a dimension that is not a multiple of 128, each as ``name [N, K]``."""
        return [f"{n} [{o}, {i}]" for n, o, i in hf_linear_modules(model) if self.is_fp8(n) and (o % _EDGE or i % _EDGE)]


def hf_linear_modules(model: ModelConfig) -> Iterator[tuple[str, int, int]]:
    """(HF module name, out features, in features) of every linear module."""
    hidden = model.hidden_size
    queries, keys = model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
    for layer in range(model.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        yield prefix + "self_attn.q_proj", queries, hidden
        yield prefix + "self_attn.k_proj", keys, hidden
        yield prefix + "self_attn.v_proj", keys, hidden
        yield prefix + "self_attn.o_proj", hidden, queries
        if model.is_moe:
            yield prefix + "mlp.gate", model.num_experts, hidden
            for expert in range(model.num_experts):
                yield from _swiglu(f"{prefix}mlp.experts.{expert}.", hidden, model.moe_intermediate_size)
        else:
            yield from _swiglu(prefix + "mlp.", hidden, model.intermediate_size)
    yield "lm_head", model.vocab_size, hidden


def _swiglu(prefix: str, hidden: int, width: int) -> Iterator[tuple[str, int, int]]:
    yield prefix + "gate_proj", width, hidden
    yield prefix + "up_proj", width, hidden
    yield prefix + "down_proj", hidden, width
