"""vLLM's router gate in the precision of ``numerics.router_precision``.

vLLM multiplies a Qwen3-MoE gate in BF16 and offers no other. Where the run asks for FP32 or FP8, the gate's linear method is replaced
when the block is built, so before weights are processed and graphs captured.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from e2e_fp8.config.root import Config

_OPTION = "router"


@dataclass(frozen=True, kw_only=True)
class GateRecipe:
    """Precision of a gate and how FP8 quantizes; the fields of ``additional_config["e2e_fp8"]["router"]``."""

    precision: str
    forward_format: str
    backward_format: str
    power_2_scale: bool
    weight_power_2_scale: bool
    amax_epsilon: float


def engine_precision(cfg: Config) -> str | None:
    """``bf16``, ``fp32`` or ``fp8`` of the engine's gates; None for a model without experts."""
    precision = cfg.numerics.router_precision
    return ("bf16" if precision == "mixed" else precision) if cfg.model.is_moe else None


def router_options(cfg: Config) -> dict[str, Any]:
    """What ``additional_config["e2e_fp8"]`` says of gates; empty where vLLM's own BF16 product is wanted."""
    precision, numerics = engine_precision(cfg), cfg.numerics
    if precision in (None, "bf16"):
        return {}
    return {
        _OPTION: {
            "precision": precision,
            "forward_format": numerics.forward_format,
            "backward_format": numerics.backward_format,
            "power_2_scale": numerics.activation_power_2_scale,
            "weight_power_2_scale": numerics.weight_power_2_scale,
            "amax_epsilon": numerics.amax_epsilon,
        }
    }


def live_precision(model: torch.nn.Module) -> str | None:
    """Precision of the gates of a live model, several joined by ``, ``; None when there is none."""
    found = set()
    for name, module in model.named_modules():
        if name.endswith(".mlp.gate"):
            found.add(getattr(getattr(module, "quant_method", None), "router_precision", "bf16"))
    return ", ".join(sorted(found)) or None


def register_router_gate() -> None:
    """Let blocks built from now on take their gate's precision from the engine's ``additional_config``. Safe to call more than once."""
    from vllm.model_executor.models.qwen3_moe import Qwen3MoeSparseMoeBlock

    original = Qwen3MoeSparseMoeBlock.__init__
    if getattr(original, "e2e_fp8_router_gate", False):
        return

    @functools.wraps(original)
    def __init__(self: Any, vllm_config: Any, prefix: str = "") -> None:
        original(self, vllm_config, prefix)
        options: Mapping[str, Any] = (vllm_config.additional_config or {}).get("e2e_fp8", {}).get(_OPTION) or {}
        if options:
            self.gate.quant_method = _method(GateRecipe(**options))

    __init__.e2e_fp8_router_gate = True  # type: ignore[attr-defined]
    Qwen3MoeSparseMoeBlock.__init__ = __init__


def _method(recipe: GateRecipe) -> Any:
    """Linear method that multiplies with ``numerics.router`` and leaves the weight as delivered."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    from e2e_fp8.numerics.router import router_logits

    class RouterLinearMethod(UnquantizedLinearMethod):
        router_precision = recipe.precision

        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            """Nothing: the CPU build would pack the weight."""

        def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            return router_logits(x, layer.weight, recipe.precision, recipe)  # type: ignore[arg-type]

    return RouterLinearMethod()
