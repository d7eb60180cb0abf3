"""Megatron names to Hugging Face names for Qwen3 and Qwen3-MoE, one table, nothing dropped.

Both grounds are covered: the local spec (``experts.local_experts.3.linear_fc1.weight``, ``input_layernorm.weight``) and the
Transformer Engine spec (``experts.linear_fc1.weight3``, ``linear_qkv.layer_norm_weight``).
"""

import re
from collections.abc import Iterable, Iterator

import torch

from e2e_fp8.config.model import ModelConfig
from e2e_fp8.export.fused import Part, split_gate_up, split_qkv
from e2e_fp8.types import ExportedTensor

NamedWeight = tuple[str, torch.Tensor, torch.Tensor | None]
"""(Megatron name, codes or high-precision weight, scale_inv or None)."""

_TOP = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}
_LAYER_RE = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT_RE = re.compile(r"mlp\.experts\.(?:local_experts\.(?P<local>\d+)\.)?linear_fc(?P<fc>[12])\.weight(?P<grouped>\d*)")


def expected_hf_names(model: ModelConfig) -> set[str]:
    """Every ``.weight`` name that a complete export of ``model`` has (scales not included)."""
    names = {"model.embed_tokens.weight", "model.norm.weight"}
    if not model.tie_word_embeddings:
        names.add("lm_head.weight")
    for layer in range(model.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        names |= {prefix + n for n in ("input_layernorm.weight", "post_attention_layernorm.weight")}
        names |= {f"{prefix}self_attn.{n}.weight" for n in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")}
        if not model.is_moe:
            names |= {f"{prefix}mlp.{n}.weight" for n in ("gate_proj", "up_proj", "down_proj")}
            continue
        names.add(prefix + "mlp.gate.weight")
        for expert in range(model.num_experts):
            names |= {f"{prefix}mlp.experts.{expert}.{n}.weight" for n in ("gate_proj", "up_proj", "down_proj")}
    return names


def _emit(hf_weight_name: str, part: Part) -> Iterator[ExportedTensor]:
    yield ExportedTensor(name=hf_weight_name, tensor=part.weight)
    if part.scale_inv is not None:
        yield ExportedTensor(name=hf_weight_name + "_scale_inv", tensor=part.scale_inv)


def _layer_parts(rest: str, part: Part, model: ModelConfig) -> Iterator[tuple[str, Part]]:
    """Names below ``model.layers.N.`` for one Megatron tensor of a layer."""
    if rest == "self_attention.linear_qkv.weight":
        parts = split_qkv(part, num_heads=model.num_attention_heads, num_groups=model.num_key_value_heads, head_dim=model.head_dim)
        yield from zip(("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"), parts, strict=True)
        return
    if rest == "mlp.linear_fc1.weight":
        yield from zip(("mlp.gate_proj.weight", "mlp.up_proj.weight"), split_gate_up(part), strict=True)
        return
    if rest in _LAYER:
        yield _LAYER[rest], part
        return
    match = _EXPERT_RE.fullmatch(rest)
    if match is None or not (match["local"] or match["grouped"]):
        raise ValueError(f"no Hugging Face name is known for the Megatron tensor decoder.layers.*.{rest}; the export would drop it")
    expert = match["local"] or match["grouped"]
    if match["fc"] == "2":
        yield f"mlp.experts.{expert}.down_proj.weight", part
        return
    gate, up = split_gate_up(part)
    yield f"mlp.experts.{expert}.gate_proj.weight", gate
    yield f"mlp.experts.{expert}.up_proj.weight", up


def to_hf(weights: Iterable[NamedWeight], model: ModelConfig) -> Iterator[ExportedTensor]:
    """Rename and un-fuse a complete set of local weights.

    Raises:
        ValueError: a Megatron tensor has no Hugging Face name, a name came twice, or names are missing at the end.
    """
    missing = expected_hf_names(model)
    for name, weight, scale_inv in weights:
        part = Part(weight=weight, scale_inv=scale_inv)
        match = _LAYER_RE.fullmatch(name)
        if match is not None:
            named = ((f"model.layers.{match[1]}.{n}", p) for n, p in _layer_parts(match[2], part, model))
        elif name in _TOP:
            named = iter([(_TOP[name], part)])
        else:
            raise ValueError(f"no Hugging Face name is known for the Megatron tensor {name}; the export would drop it")
        for hf_name, hf_part in named:
            if hf_name not in missing:
                raise ValueError(f"{hf_name} (from {name}) was exported twice or is not part of the architecture")
            missing.discard(hf_name)
            yield from _emit(hf_name, hf_part)
    if missing:
        raise ValueError(f"the trainer gave no tensor for {len(missing)} names, first {sorted(missing)[:5]}")
