"""A trainer rank's weights under the names that a layout plan uses: those of each of its model chunks."""

from collections.abc import Iterable, Sequence

import torch

from e2e_fp8.errors import LayoutError
from e2e_fp8.export.hf_names import NamedWeight
from e2e_fp8.layout import ShardedParameter
from e2e_fp8.megatron_names import whole_model_name

NamedTensors = dict[str, torch.Tensor]


def by_chunk(weights: Iterable[NamedWeight], layout: Sequence[ShardedParameter]) -> tuple[list[NamedTensors], list[NamedTensors]]:
    """``(tensors, scales)`` of a rank for ``sync.reshard.outgoing``: for each chunk, a mapping from Megatron's names in it.

    Args:
        weights: what the rank holds, under names of the whole model (``MegatronEngine.named_local_weights``).
        layout: what the rank should hold (``MegatronEngine.layout_of``).

    Raises:
        LayoutError: a weight of the layout is missing or has another shape, or one that it does not know is there.
    """
    held = {name: (tensor, scale_inv) for name, tensor, scale_inv in weights}
    chunks = 1 + max((entry.chunk for entry in layout), default=0)
    tensors: list[NamedTensors] = [{} for _ in range(chunks)]
    scales: list[NamedTensors] = [{} for _ in range(chunks)]
    for entry in layout:
        full = whole_model_name(entry.name, entry.layer, entry.expert)
        if full not in held:
            raise LayoutError(f"This rank's layout has {full}, but the trainer gave no such weight: model and layout are different ones.")
        tensor, scale_inv = held.pop(full)
        if tuple(tensor.shape) != entry.shape:
            raise LayoutError(f"The trainer holds {full} as {list(tensor.shape)}, but this rank's layout has {list(entry.shape)}.")
        tensors[entry.chunk][entry.name] = tensor
        if scale_inv is not None:
            scales[entry.chunk][entry.name] = scale_inv
    if held:
        raise LayoutError(f"The trainer gave {min(held)} ({len(held)} such weights), which this rank's layout does not have.")
    return tensors, scales
