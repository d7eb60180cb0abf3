"""Tile statistics of what the linears of one training step quantize: weights, activations, output gradients.

Hooks read the BF16 tensors at the linears' borders. A fused norm-and-linear (Transformer Engine) normalises inside, so its
input is left out of the activations; its output gradient is counted.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from types import TracebackType
from typing import Any, Protocol

import torch

from e2e_fp8.numerics.formats import TILE, fp8_format_of
from e2e_fp8.numerics.quantization_plan import QuantizationPlan
from e2e_fp8.numerics.tile_stats import tile_statistics


class Counted(Protocol):
    """The part of ``MegatronEngine`` that is counted."""

    @property
    def model(self) -> Any: ...
    def named_masters(self) -> Iterator[tuple[str, torch.Tensor]]: ...


_LINEARS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
_MOE_FC1 = re.compile(r"\blayers\.(\d+)\.mlp\.experts\b.*\blinear_fc1$")
"""The first linear of an expert, or of all experts of a layer as one module; the group is the layer."""
_FC1_METRIC = "tiles/moe_fc1_gradients/out_of_e4m3_range"


class TileCensus:
    """Context manager over one training step; ``record`` afterwards holds mean fractions weighted by elements."""

    def __init__(self, model: torch.nn.Module, plan: QuantizationPlan) -> None:
        self._model = model
        self._plan = plan
        self._handles: list[Any] = []
        self._sums: dict[str, float] = defaultdict(float)
        self._elements: dict[str, int] = defaultdict(int)
        self._fc1_tiles: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
        """MoE layer -> tiles of fc1's output gradients with a non-zero element, and those of them that leave E4M3's range."""

    def __enter__(self) -> "TileCensus":
        for name, module in self._model.named_modules():
            if name.rpartition(".")[2] in _LINEARS:
                self._handles.append(module.register_forward_hook(partial(self._hook, self._moe_layer(name))))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for handle in self._handles:
            handle.remove()

    def _moe_layer(self, name: str) -> int | None:
        """Layer of the whole model, from 0, of an expert's fc1; None for other linears. A pipeline rank counts its own layers from 0."""
        found = _MOE_FC1.search(name)
        if found is None:
            return None
        number = getattr(self._model.get_submodule(name[: found.end(1)]), "layer_number", None)
        return int(found[1]) if number is None else number - 1

    def _hook(self, layer: int | None, module: torch.nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        result = output[0] if isinstance(output, tuple) else output
        if "LayerNorm" not in type(module).__name__:
            self._count("activations", inputs[0].detach(), self._plan.forward_format)
        if result.requires_grad:
            result.register_hook(lambda gradient: self._count_gradient(layer, gradient.detach()))

    def _count(self, kind: str, tensor: torch.Tensor, format_name: str) -> dict[str, float]:
        matrix = tensor.reshape(-1, tensor.shape[-1])
        return self._add(kind, matrix, format_name, "1x128") if matrix.numel() else {}

    def _count_gradient(self, layer: int | None, gradient: torch.Tensor) -> None:
        stats = self._count("gradients", gradient, self._plan.backward_format)
        if stats and layer is not None:
            tiles = gradient.numel() // gradient.shape[-1] * -(-gradient.shape[-1] // TILE)
            counts = self._fc1_tiles[layer]
            counts[0] += tiles * (1.0 - stats["zero"])
            counts[1] += tiles * stats["out_of_e4m3_range"]

    def _add(self, kind: str, matrix: torch.Tensor, format_name: str, tile: Any) -> dict[str, float]:
        power_2_scale = self._plan.weight_power_2_scale if kind == "weights" else self._plan.power_2_scale
        stats = tile_statistics(matrix, fp8_format_of(format_name), tile, power_2_scale=power_2_scale, amax_epsilon=self._plan.amax_epsilon)
        for key, value in stats.items():
            self._sums[f"tiles/{kind}/{key}"] += value * matrix.numel()
            self._elements[f"tiles/{kind}/{key}"] += matrix.numel()
        return stats

    def count_weight(self, weight_NK: torch.Tensor) -> None:
        """Add one BF16 weight ``[N, K]``."""
        self._add("weights", weight_NK, self._plan.forward_format, "128x128")

    def counts(self) -> dict[str, list[list[float]]]:
        """By metric its sum weighted by elements, and the elements; by layer its fc1 gradient tiles. JSON, for :meth:`add_counts`."""
        metrics = {key: [[total, self._elements[key]]] for key, total in self._sums.items()}
        return metrics | {_FC1_METRIC: [[layer, *tiles] for layer, tiles in self._fc1_tiles.items()]}

    def add_counts(self, counts: dict[str, list[list[float]]]) -> None:
        """Add what another rank counted."""
        for key, rows in counts.items():
            for row in rows:
                if key == _FC1_METRIC:
                    mine = self._fc1_tiles[int(row[0])]
                    mine[:] = [mine[0] + row[1], mine[1] + row[2]]
                else:
                    self._sums[key] += row[0]
                    self._elements[key] += int(row[1])

    def record(self) -> dict[str, float]:
        """``tiles/{weights,activations,gradients}/{saturated,...}`` as fractions in [0, 1].

        With experts also ``tiles/moe_fc1_gradients/out_of_e4m3_range`` and ``..._worst``: of the non-zero tiles of fc1's output
        gradients, those with a non-zero element that E4M3 would flush; mean over the layers and largest of a layer.
        """
        record = {key: total / self._elements[key] for key, total in self._sums.items()}
        shares = [lost / tiles for tiles, lost in self._fc1_tiles.values() if tiles]
        if shares:
            record |= {_FC1_METRIC: sum(shares) / len(shares), f"{_FC1_METRIC}_worst": max(shares)}
        return record


def census_of(engine: Counted, plan: QuantizationPlan) -> TileCensus:
    """A census of one rank's next step with the weights of its linears counted. Collective where data parallelism divides masters."""
    census = TileCensus(engine.model, plan)
    for name, weight in engine.named_masters():
        if weight.dim() == 2 and ".linear_" in name:
            census.count_weight(weight.to(torch.bfloat16))
    return census
