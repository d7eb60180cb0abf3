"""Megatron's router with its logits in the precision of ``numerics.router_precision``."""

from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter

from e2e_fp8.errors import ConfigError
from e2e_fp8.numerics.quantization_plan import QuantizationPlan
from e2e_fp8.numerics.router import RouterPrecision, router_logits


class PreciseRouter(TopKRouter):
    """``become`` turns a built router into this class, keeping its parameters. Probabilities stay FP32."""

    precision: RouterPrecision
    recipe: QuantizationPlan

    @classmethod
    def become(cls, router: TopKRouter, precision: RouterPrecision, plan: QuantizationPlan) -> None:
        """Change the class of ``router`` in place.

        Raises:
            ConfigError: the router is of another class, or has a bias.
        """
        if type(router) is not TopKRouter or router.bias is not None:
            raise ConfigError(
                f"A router is a {type(router).__name__} or has a bias, but numerics.router_precision knows a plain TopKRouter."
            )
        router.__class__ = cls
        vars(router).update(precision=precision, recipe=plan)

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """float32 logits ``[..., E]``."""
        return router_logits(input, self.weight, self.precision, self.recipe)


def set_router_precision(model: torch.nn.Module, precision: str, plan: QuantizationPlan) -> None:
    """Give every router of ``model`` the stated precision; Megatron's own, with FP32 products, is both ``mixed`` and ``fp32``."""
    if precision not in ("bf16", "fp8"):
        return
    routers: list[Any] = [module for module in model.modules() if isinstance(module, TopKRouter)]
    for router in routers:
        PreciseRouter.become(router, precision, plan)  # type: ignore[arg-type]
