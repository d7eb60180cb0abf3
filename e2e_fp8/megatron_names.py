"""Megatron's parameter names in either spec, and the Hugging Face parameters behind them, as :mod:`e2e_fp8.layout` has them.

Both grounds are covered: the local spec (``experts.local_experts.3.linear_fc1.weight``, ``input_layernorm.weight``) and the
Transformer Engine spec (``experts.linear_fc1.weight3``, ``linear_qkv.layer_norm_weight``).
"""

import re
from functools import cache
from typing import NamedTuple

from e2e_fp8.layout import MegatronParallel, megatron_shards
from e2e_fp8.layout.megatron import QkvOrder, Spec

_LAYER_NUMBER = re.compile(r"^(decoder\.layers\.)(\d+)(?=\.)")
_EXPERT_NUMBER = re.compile(r"(\.experts\.local_experts\.|\.experts\.linear_fc[12]\.weight)(\d+)")
_SMALLEST = {
    **dict.fromkeys(("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"), 1),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "num_experts"), 1),
}
"""A model whose names are all names there are, with every number 0."""

QKV_ORDER: QkvOrder = "engine"
"""Order of the rows of ``linear_qkv`` in this trainer (training.attention splits them so), by the layout's names."""


class _Known(NamedTuple):
    hf_names: tuple[str, ...]
    local: str
    """The local spec's name."""


@cache
def _known() -> dict[str, _Known]:
    """Every name of either spec, all numbers 0, of the families that were trained."""
    found: dict[str, _Known] = {}
    for family in ("qwen3", "qwen3_moe"):
        local_of: dict[tuple[str, ...], str] = {}
        specs: tuple[Spec, ...] = ("local", "te")
        for spec in specs:
            for shard in megatron_shards(_SMALLEST | {"model_type": family}, MegatronParallel(), 0, qkv_order=QKV_ORDER, spec=spec):
                hf_names = tuple(dict.fromkeys(part.hf_name for part in shard.parts))
                found[shard.name] = _Known(hf_names, local_of.setdefault(hf_names, shard.name))
    return found


def _look_up(megatron_name: str) -> tuple[_Known, str, str]:
    """What is known of a name, and its numbers of layer and expert (empty where it has none)."""
    layer, expert = _LAYER_NUMBER.match(megatron_name), _EXPERT_NUMBER.search(megatron_name)
    known = _known().get(_EXPERT_NUMBER.sub(r"\g<1>0", _LAYER_NUMBER.sub(r"\g<1>0", megatron_name)))
    if known is None:
        raise ValueError(f"No Hugging Face name is known for the trainer's parameter {megatron_name}.")
    return known, layer[2] if layer else "", expert[2] if expert else ""


def whole_model_name(local_name: str, layer: int | None, expert: int | None) -> str:
    """Name of a parameter of one model chunk with the numbers that layer and expert (if any) have in the whole model."""
    if layer is None:
        return local_name
    name = _LAYER_NUMBER.sub(rf"\g<1>{layer}", local_name)
    return name if expert is None else _EXPERT_NUMBER.sub(rf"\g<1>{expert}", name)


def neutral_name(megatron_name: str) -> str:
    """The local spec's name of a parameter of either ground, so that a checkpoint of one ground can be read on the other.

    Raises ValueError as :func:`hf_sources` does.
    """
    known, layer, expert = _look_up(megatron_name)
    return _EXPERT_NUMBER.sub(rf"\g<1>{expert}", _LAYER_NUMBER.sub(rf"\g<1>{layer}", known.local))


def hf_sources(megatron_name: str) -> list[str]:
    """HF parameter names that make up one Megatron parameter, in fusion order; of either ground's name.

    Raises:
        ValueError: the name is not one of Qwen3's or Qwen3-MoE's.
    """
    known, layer, expert = _look_up(megatron_name)
    return [
        name.replace("model.layers.0.", f"model.layers.{layer}.").replace(".experts.0.", f".experts.{expert}.") for name in known.hf_names
    ]
