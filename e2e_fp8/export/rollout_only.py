"""Block quantization at export, for the rollout-only FP8 arm: a BF16 trainer whose engine runs FP8.

This is what most frameworks do at every sync. It exists here to be compared with; with an FP8 trainer nothing is quantized
on the way out.
"""

from collections.abc import Iterable, Iterator

from e2e_fp8.numerics.blockwise import quantize_blockwise
from e2e_fp8.numerics.formats import E4M3
from e2e_fp8.numerics.quantization_plan import QuantizationPlan
from e2e_fp8.types import ExportedTensor


def quantize_for_rollout(tensors: Iterable[ExportedTensor], plan: QuantizationPlan) -> Iterator[ExportedTensor]:
    """Replace every BF16 weight that the plan calls FP8 by its codes and ``weight_scale_inv``."""
    for entry in tensors:
        module = entry.name.removesuffix(".weight")
        if module == entry.name or not plan.is_fp8(module):
            yield entry
            continue
        block = quantize_blockwise(
            entry.tensor, E4M3, tile="128x128", power_2_scale=plan.weight_power_2_scale, amax_epsilon=plan.amax_epsilon
        )
        yield ExportedTensor(name=entry.name, tensor=block.codes)
        yield ExportedTensor(name=entry.name + "_scale_inv", tensor=block.scale_inv)
