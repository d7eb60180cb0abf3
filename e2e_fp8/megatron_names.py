"""Megatron's parameter names and the Hugging Face parameters each is made of, for Qwen3 and Qwen3-MoE: the one table.

Both grounds are covered: the local spec (``experts.local_experts.3.linear_fc1.weight``, ``input_layernorm.weight``) and the
Transformer Engine spec (``experts.linear_fc1.weight3``, ``linear_qkv.layer_norm_weight``).
"""

import re
from typing import Literal

_LAYER_NAMES = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "mlp.router.weight": "mlp.gate.weight",
}
_TOP = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_LAYER_NUMBER = re.compile(r"^decoder\.layers\.\d+\.")
_EXPERT_NUMBER = re.compile(r"(\.experts\.local_experts\.|\.experts\.linear_fc[12]\.weight)\d+")
_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
_GROUPED = re.compile(r"mlp\.experts\.linear_fc([12])\.weight(\d+)$")
_EXPERT = re.compile(r"mlp\.experts\.(?:local_experts\.(\d+)\.linear_fc([12])\.weight|linear_fc([12])\.weight(\d+))")


QKV_ORDER: Literal["megatron", "engine"] = "engine"
"""Order of the rows of ``linear_qkv`` in this trainer (training.attention splits them so), by the layout's names."""


def whole_model_name(local_name: str, layer: int | None, expert: int | None) -> str:
    """Name of a parameter of one model chunk with the numbers that layer and expert (if any) have in the whole model."""
    if layer is None:
        return local_name
    name = _LAYER_NUMBER.sub(f"decoder.layers.{layer}.", local_name)
    return name if expert is None else _EXPERT_NUMBER.sub(rf"\g<1>{expert}", name)


def neutral_name(megatron_name: str) -> str:
    """The local spec's name of a parameter of either ground, so that a checkpoint of one ground can be read on the other."""
    for fused, local in _FUSED_NORMS.items():
        if megatron_name.endswith(fused):
            return megatron_name.removesuffix(fused) + local
    return _GROUPED.sub(r"mlp.experts.local_experts.\2.linear_fc\1.weight", megatron_name)


def hf_sources(megatron_name: str) -> list[str]:
    """HF parameter names that make up one Megatron parameter, in fusion order.

    Takes names of both grounds (``...experts.local_experts.3.linear_fc1.weight`` and ``...experts.linear_fc1.weight3``).

    Raises:
        ValueError: the name is not one of Qwen3's or Qwen3-MoE's.
    """
    if megatron_name in _TOP:
        return [_TOP[megatron_name]]
    layer = _LAYER.fullmatch(megatron_name)
    if layer is None:
        raise ValueError(f"No Hugging Face name is known for the trainer's parameter {megatron_name}.")
    prefix, rest = f"model.layers.{layer[1]}.", layer[2]
    if rest in _LAYER_NAMES:
        return [prefix + _LAYER_NAMES[rest]]
    if rest == "self_attention.linear_qkv.weight":
        return [f"{prefix}self_attn.{p}_proj.weight" for p in "qkv"]
    if rest == "mlp.linear_fc1.weight":
        return [f"{prefix}mlp.{p}_proj.weight" for p in ("gate", "up")]
    expert = _EXPERT.fullmatch(rest)
    if expert is None:
        raise ValueError(f"No Hugging Face name is known for the trainer's parameter {megatron_name}.")
    index, half = (expert[1], expert[2]) if expert[1] is not None else (expert[4], expert[3])
    projections = ("gate", "up") if half == "1" else ("down",)
    return [f"{prefix}mlp.experts.{index}.{p}_proj.weight" for p in projections]
