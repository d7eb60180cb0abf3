"""What differs between the CPU and the CUDA ground of the trainer; everything else is one code path."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch

from e2e_fp8.config.root import Config
from e2e_fp8.layout.megatron import Spec
from e2e_fp8.megatron_names import neutral_name
from e2e_fp8.numerics.quantization_plan import QuantizationPlan

if TYPE_CHECKING:
    from e2e_fp8.training.parallel import Parameter

_EXPERT_WEIGHT = re.compile(r"(.*\.local_experts\.)(\d+)(\.linear_fc[12])\.weight")


class Ground(Protocol):
    """Device-specific pieces of ``MegatronEngine``."""

    device: torch.device
    process_group_backend: str
    spec: Spec
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

    def arrange_parameters(self, model: torch.nn.Module) -> None:
        """Before Megatron lays the parameters out in its buffers: bring the experts of a layer into the engine's order."""
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

    def high_precision(self, chunks: Sequence[Any], master_of: Callable[[torch.Tensor], torch.Tensor]) -> AbstractContextManager[None]:
        """Context inside which every FP8 linear of the model chunks multiplies bf16(FP32 master) in BF16; forward passes alone.

        ``master_of`` gives the FP32 master of a parameter in its shape (collective over its data-parallel group). No second copy of
        the model is kept: at most one module's weights exist in BF16 beside the FP8 ones.
        """
        ...

    def is_fp8(self, parameter: torch.Tensor) -> bool:
        """Whether ``fp8_weight`` has an answer for this parameter."""
        ...

    def fp8_weight(self, parameter: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``(codes float8_e4m3fn [N, K], scale_inv float32 [ceil(N/128), ceil(K/128)])``; the bytes the forward pass uses."""
        ...

    def fp8_addresses(self, parameter: torch.Tensor) -> tuple[int, int]:
        """First byte of what :meth:`fp8_weight` returns, without making views."""
        ...

    def rng_state(self) -> dict[str, torch.Tensor]: ...
    def set_rng_state(self, state: dict[str, torch.Tensor]) -> None: ...


def local_expert_weights(names: Iterable[str]) -> Iterator[list[str]]:
    """For each layer and each of fc1 and fc2, the parameters among ``names`` of this rank's experts in ascending order."""
    groups: dict[str, list[tuple[int, str]]] = {}
    for name in names:
        match = _EXPERT_WEIGHT.fullmatch(neutral_name(name))
        if match is not None:
            groups.setdefault(match[1] + match[3], []).append((int(match[2]), name))
    for members in groups.values():
        yield [name for _, name in sorted(members)]
