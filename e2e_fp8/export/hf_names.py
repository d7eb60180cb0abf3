"""A complete set of trainer weights under Hugging Face names, un-fused; nothing dropped, nothing twice."""

from collections.abc import Iterable, Iterator

import torch

from e2e_fp8.config.hf import to_hf_config
from e2e_fp8.config.model import ModelConfig
from e2e_fp8.export.fused import Part, split_rows
from e2e_fp8.layout import hf_tensors
from e2e_fp8.megatron_names import hf_sources
from e2e_fp8.types import ExportedTensor

NamedWeight = tuple[str, torch.Tensor, torch.Tensor | None]
"""(Megatron name, codes or high-precision weight, scale_inv or None)."""


def expected_hf_names(model: ModelConfig) -> set[str]:
    """Every ``.weight`` name that a complete export of ``model`` has (scales not included)."""
    return {tensor.name for tensor in hf_tensors(to_hf_config(model, None))}


def _emit(hf_weight_name: str, part: Part) -> Iterator[ExportedTensor]:
    yield ExportedTensor(name=hf_weight_name, tensor=part.weight)
    if part.scale_inv is not None:
        yield ExportedTensor(name=hf_weight_name + "_scale_inv", tensor=part.scale_inv)


def _split(part: Part, count: int, model: ModelConfig) -> tuple[Part, ...]:
    """The ``count`` Hugging Face matrices of one Megatron matrix: itself, gate and up, or q, k and v."""
    rows = part.weight.shape[0]
    if count != 3:
        return split_rows(part, [rows // count] * count) if count > 1 else (part,)
    heads, groups = model.num_attention_heads, model.num_key_value_heads
    return split_rows(part, [width * model.head_dim for width in (heads, groups, groups)])


def to_hf(weights: Iterable[NamedWeight], model: ModelConfig) -> Iterator[ExportedTensor]:
    """Rename and un-fuse a complete set of local weights.

    Raises:
        ValueError: a Megatron tensor has no Hugging Face name, a name came twice, or names are missing at the end.
    """
    missing = expected_hf_names(model)
    for name, weight, scale_inv in weights:
        part = Part(weight=weight, scale_inv=scale_inv)
        hf_names = hf_sources(name)
        for hf_name, hf_part in zip(hf_names, _split(part, len(hf_names), model), strict=True):
            if hf_name not in missing:
                raise ValueError(f"{hf_name} (from {name}) was exported twice or is not part of the architecture")
            missing.discard(hf_name)
            yield from _emit(hf_name, hf_part)
    if missing:
        raise ValueError(f"the trainer gave no tensor for {len(missing)} names, first {sorted(missing)[:5]}")
