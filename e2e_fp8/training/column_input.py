"""What a column-parallel linear multiplies, and how its input gradient comes back from all tensor ranks."""

from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region


def column_input(input: torch.Tensor, *, allreduce_dgrad: bool, sequence_parallel: bool, tp_group: Any) -> torch.Tensor:
    """The whole input ``[T, ..., K]`` of a linear whose rows are divided over ``tp_group``; its gradient is summed over the group.

    Under sequence parallelism ``input`` holds this rank's tokens only: they are gathered, and the gradient is scattered back.
    """
    if sequence_parallel:
        return gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=tp_group)
    return copy_to_tensor_model_parallel_region(input, group=tp_group) if allreduce_dgrad else input
