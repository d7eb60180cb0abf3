"""What differs between the CPU and the CUDA ground of the trainer; everything else is one code path."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch

from e2e_fp8.config.root import Config
from e2e_fp8.numerics.quantization_plan import QuantizationPlan

if TYPE_CHECKING:
    from e2e_fp8.training.parallel import Parameter


class Ground(Protocol):
    """Device-specific pieces of ``MegatronEngine``."""

    device: torch.device
    process_group_backend: str
    spec: Literal["te", "local"]
    """Whose parameter names the model has, by the layout's names."""
    token_multiple: int
    """Packed token counts are padded to a multiple of this (1: no padding)."""

    def scope(self) -> AbstractContextManager[None]:
        """Context inside which Megatron code runs on this ground."""
        ...

    def prepare(self) -> None:
        """Once, before anything of Megatron is built: patches, environment checks, RNG tracker."""
        ...

    def transformer_kwargs(self, cfg: Config) -> dict[str, Any]:
        """Fields of TransformerConfig that only this ground sets."""
        ...

    def ddp_kwargs(self) -> dict[str, Any]:
        """Fields of DistributedDataParallelConfig that only this ground sets."""
        ...

    def optimizer_kwargs(self) -> dict[str, Any]:
        """Fields of OptimizerConfig that only this ground sets."""
        ...

    def layer_spec(self, cfg: Config, config: Any, chunk: int | None) -> Any:
        """Megatron layer or block spec with this ground's linears, norms and PackedAttention.

        ``config`` is the TransformerConfig, ``chunk`` the index among the rank's pipeline chunks (None without virtual pipelining).
        """
        ...

    def configure_precision(self, linears: Sequence["Parameter"], plan: QuantizationPlan) -> None:
        """Switch the planned linears to FP8 and check that every planned one is FP8 of the planned scale kind, and no other is.

        Raises:
            ConfigError: a planned module would run in another precision.
        """
        ...

    def after_parameter_sync(self) -> None:
        """Bring whatever is derived from the weights up to date."""
        ...

    def is_fp8(self, parameter: torch.Tensor) -> bool:
        """Whether ``fp8_weight`` has an answer for this parameter."""
        ...

    def fp8_weight(self, parameter: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``(codes float8_e4m3fn [N, K], scale_inv float32 [ceil(N/128), ceil(K/128)])``; the bytes the forward pass uses."""
        ...

    def rng_state(self) -> dict[str, torch.Tensor]: ...
    def set_rng_state(self, state: dict[str, torch.Tensor]) -> None: ...
