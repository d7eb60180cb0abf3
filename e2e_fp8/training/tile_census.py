"""Tile statistics of what the linears of one training step quantize: weights, activations, output gradients.

Hooks read the BF16 tensors at the linears' borders. A fused norm-and-linear (Transformer Engine) normalises inside, so its
input is left out of the activations; its output gradient is counted.
"""

from collections import defaultdict
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Protocol

import torch

from e2e_fp8.numerics.formats import fp8_format_of
from e2e_fp8.numerics.quantization_plan import QuantizationPlan
from e2e_fp8.numerics.tile_stats import tile_statistics


class Counted(Protocol):
    """The part of ``MegatronEngine`` that is counted."""

    @property
    def model(self) -> Any: ...
    def named_masters(self) -> Iterator[tuple[str, torch.Tensor]]: ...


_LINEARS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


class TileCensus:
    """Context manager over one training step; ``record`` afterwards holds mean fractions weighted by elements."""

    def __init__(self, model: torch.nn.Module, plan: QuantizationPlan) -> None:
        self._model = model
        self._plan = plan
        self._handles: list[Any] = []
        self._sums: dict[str, float] = defaultdict(float)
        self._elements: dict[str, int] = defaultdict(int)

    def __enter__(self) -> "TileCensus":
        for name, module in self._model.named_modules():
            if name.rpartition(".")[2] in _LINEARS:
                self._handles.append(module.register_forward_hook(self._hook))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, module: torch.nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        result = output[0] if isinstance(output, tuple) else output
        if "LayerNorm" not in type(module).__name__:
            self._count("activations", inputs[0].detach(), self._plan.forward_format)
        if result.requires_grad:
            result.register_hook(lambda gradient: self._count("gradients", gradient.detach(), self._plan.backward_format))

    def _count(self, kind: str, tensor: torch.Tensor, format_name: str) -> None:
        matrix = tensor.reshape(-1, tensor.shape[-1])
        if matrix.numel():
            self._add(kind, matrix, format_name, "1x128")

    def _add(self, kind: str, matrix: torch.Tensor, format_name: str, tile: Any) -> None:
        stats = tile_statistics(
            matrix, fp8_format_of(format_name), tile, power_2_scale=self._plan.power_2_scale, amax_epsilon=self._plan.amax_epsilon
        )
        for key, value in stats.items():
            self._sums[f"tiles/{kind}/{key}"] += value * matrix.numel()
            self._elements[f"tiles/{kind}/{key}"] += matrix.numel()

    def count_weight(self, weight_NK: torch.Tensor) -> None:
        """Add one BF16 weight ``[N, K]``."""
        self._add("weights", weight_NK, self._plan.forward_format, "128x128")

    def counts(self) -> dict[str, list[float]]:
        """By metric its sum weighted by elements, and the elements; JSON, for :meth:`add_counts` of another rank."""
        return {key: [total, self._elements[key]] for key, total in self._sums.items()}

    def add_counts(self, counts: dict[str, list[float]]) -> None:
        """Add what another rank counted."""
        for key, (total, elements) in counts.items():
            self._sums[key] += total
            self._elements[key] += int(elements)

    def record(self) -> dict[str, float]:
        """``tiles/{weights,activations,gradients}/{saturated,...}`` as fractions in [0, 1]."""
        return {key: total / self._elements[key] for key, total in self._sums.items()}


def census_of(engine: Counted, plan: QuantizationPlan) -> TileCensus:
    """A census of one rank's next step with the weights of its linears counted. Collective where data parallelism divides masters."""
    census = TileCensus(engine.model, plan)
    for name, weight in engine.named_masters():
        if weight.dim() == 2 and ".linear_" in name:
            census.count_weight(weight.to(torch.bfloat16))
    return census
