"""The Hugging Face tensors of a model, from its config.json: name, shape, kind, precision.

A model is a few *blocks*: the tensors outside the layers, and one block for each kind of layer (dense or mixture of experts,
with its set of modules kept in BF16). Names inside a layer's block are relative: ``self_attn.q_proj.weight``.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from e2e_fp8.errors import LayoutError
from e2e_fp8.layout.tiles import TILE

FAMILIES = ("qwen2", "qwen3", "qwen3_moe", "llama", "deepseek_v3")
Kind = Literal["linear", "norm", "embedding", "router", "router_bias", "bias", "value_head"]
Fp8Predicate = Callable[[str], bool]


FP8_DTYPE = "float8_e4m3fn"


def dtype_name(kind: Kind, fp8: bool) -> str:
    """``float8_e4m3fn``, ``float32`` (the router's bias, a critic's head) or ``bfloat16``: the same on both sides."""
    return FP8_DTYPE if fp8 else "float32" if kind in ("router_bias", "value_head") else "bfloat16"


@dataclass(frozen=True, slots=True)
class HfTensor:
    """One tensor of a Hugging Face checkpoint."""

    name: str
    """``model.layers.3.mlp.up_proj.weight``; within a block, without ``model.layers.3.``."""
    shape: tuple[int, ...]
    kind: Kind
    fp8: bool = False
    """Block FP8: E4M3 codes with ``<name>_scale_inv``."""

    @property
    def dtype(self) -> str:
        """See ``dtype_name``."""
        return dtype_name(self.kind, self.fp8)


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What makes two layers of one model differ in layout."""

    moe: bool
    high_precision: frozenset[str] = frozenset()
    """Linear modules of this layer that stay BF16, by relative name."""


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Sizes of multi-head latent attention (DeepSeek-V3)."""

    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Everything of a config.json that decides names and shapes."""

    family: str
    layers: int
    hidden: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    tied: bool
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: int = 0
    moe_ffn: int = 0
    shared_ffn: int = 0
    router_bias: bool = False
    mla: LatentAttention | None = None
    next_token_layers: int = 0
    """Multi-token-prediction layers after the last one: in the checkpoint, in neither side's model."""
    kinds: tuple[LayerKind, ...] = ()
    """Kind of each layer, ``layers`` long."""

    @property
    def distinct_kinds(self) -> tuple[LayerKind, ...]:
        """The kinds that occur, in order of first occurrence."""
        return tuple(dict.fromkeys(self.kinds))


def model_shape(config: Mapping[str, Any], fp8: Fp8Predicate | None = None) -> ModelShape:
    """Sizes of the model with this config.json.

    ``fp8(hf_module)`` says which linear modules are block FP8. By default it follows ``quantization_config``; without one,
    every linear module of the layers is FP8, which is what this project trains. Router, embedding and head never are.

    Raises:
        LayoutError: an unknown family, a missing size, or a feature whose tensors are not laid out here.
    """
    family = config.get("model_type")
    if family not in FAMILIES:
        raise LayoutError(f"model_type {family!r} has no layout here: known are {', '.join(FAMILIES)}.")
    _refuse_features(config, family)
    heads, hidden = _size(config, "num_attention_heads"), _size(config, "hidden_size")
    shape = ModelShape(
        family=family,
        layers=_size(config, "num_hidden_layers"),
        hidden=hidden,
        vocab=_size(config, "vocab_size"),
        heads=heads,
        kv_heads=_size(config, "num_key_value_heads", heads),
        head_dim=_size(config, "head_dim", 128 if family in ("qwen3", "qwen3_moe") else hidden // heads),
        ffn=_size(config, "intermediate_size"),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2",
        qk_norm=family in ("qwen3", "qwen3_moe"),
        **_mixture(config, family),
    )
    if shape.heads % shape.kv_heads:
        raise LayoutError(f"num_attention_heads {shape.heads} is not a multiple of num_key_value_heads {shape.kv_heads}.")
    predicate = fp8 or _configured_predicate(config)
    kinds = tuple(_layer_kind(shape, _is_moe(config, family, index), index, predicate) for index in range(shape.layers))
    return ModelShape(**{**{f: getattr(shape, f) for f in shape.__dataclass_fields__}, "kinds": kinds})


def layer_prefix(index: int) -> str:
    """``model.layers.<index>.``"""
    return f"model.layers.{index}."


def layer_tensors(shape: ModelShape, kind: LayerKind) -> dict[str, HfTensor]:
    """Relative name -> tensor, of a layer of ``kind``."""
    tensors = [_norm("input_layernorm", shape.hidden), _norm("post_attention_layernorm", shape.hidden)]
    tensors += _latent_attention(shape, shape.mla, kind) if shape.mla else _attention(shape, kind)
    if not kind.moe:
        tensors += _swiglu("mlp", shape.hidden, shape.ffn, kind)
    else:
        tensors.append(HfTensor("mlp.gate.weight", (shape.experts, shape.hidden), "router"))
        if shape.router_bias:
            tensors.append(HfTensor("mlp.gate.e_score_correction_bias", (shape.experts,), "router_bias"))
        if shape.shared_ffn:
            tensors += _swiglu("mlp.shared_experts", shape.hidden, shape.shared_ffn, kind)
        for expert in range(shape.experts):
            tensors += _swiglu(f"mlp.experts.{expert}", shape.hidden, shape.moe_ffn, kind)
    return {tensor.name: tensor for tensor in tensors}


def top_tensors(shape: ModelShape) -> dict[str, HfTensor]:
    """Name -> tensor, of what lies outside the layers. A tied head is not a tensor of its own."""
    tensors = [HfTensor("model.embed_tokens.weight", (shape.vocab, shape.hidden), "embedding"), _norm("model.norm", shape.hidden)]
    if not shape.tied:
        tensors.append(HfTensor("lm_head.weight", (shape.vocab, shape.hidden), "embedding"))
    return {tensor.name: tensor for tensor in tensors}


def hf_tensors(config: Mapping[str, Any], fp8: Fp8Predicate | None = None) -> Iterator[HfTensor]:
    """Every tensor of the model under its full name, layer by layer. See ``model_shape`` for ``fp8`` and errors."""
    shape = model_shape(config, fp8)
    top = top_tensors(shape)
    yield top.pop("model.embed_tokens.weight")
    blocks = {kind: layer_tensors(shape, kind) for kind in shape.distinct_kinds}
    for index, kind in enumerate(shape.kinds):
        for tensor in blocks[kind].values():
            yield HfTensor(layer_prefix(index) + tensor.name, tensor.shape, tensor.kind, tensor.fp8)
    yield from top.values()


def ignored_prefixes(config: Mapping[str, Any]) -> list[str]:
    """Prefixes of checkpoint tensors that neither trainer nor engine holds: the multi-token-prediction layers."""
    shape = model_shape(config)
    return [layer_prefix(shape.layers + index) for index in range(shape.next_token_layers)]


def _norm(module: str, size: int) -> HfTensor:
    return HfTensor(f"{module}.weight", (size,), "norm")


def _linear(module: str, rows: int, columns: int, kind: LayerKind) -> HfTensor:
    return HfTensor(f"{module}.weight", (rows, columns), "linear", fp8=module not in kind.high_precision)


def _attention(shape: ModelShape, kind: LayerKind) -> list[HfTensor]:
    sizes = {"q": shape.heads * shape.head_dim, "k": shape.kv_heads * shape.head_dim, "v": shape.kv_heads * shape.head_dim}
    tensors = [_linear(f"self_attn.{p}_proj", rows, shape.hidden, kind) for p, rows in sizes.items()]
    if shape.qkv_bias:
        tensors += [HfTensor(f"self_attn.{p}_proj.bias", (rows,), "bias") for p, rows in sizes.items()]
    if shape.qk_norm:
        tensors += [_norm(f"self_attn.{p}_norm", shape.head_dim) for p in "qk"]
    return [*tensors, _linear("self_attn.o_proj", shape.hidden, sizes["q"], kind)]


def _latent_attention(shape: ModelShape, mla: LatentAttention, kind: LayerKind) -> list[HfTensor]:
    query_width = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    return [
        _linear("self_attn.q_a_proj", mla.q_lora_rank, shape.hidden, kind),
        _norm("self_attn.q_a_layernorm", mla.q_lora_rank),
        _linear("self_attn.q_b_proj", shape.heads * query_width, mla.q_lora_rank, kind),
        _linear("self_attn.kv_a_proj_with_mqa", mla.kv_lora_rank + mla.qk_rope_head_dim, shape.hidden, kind),
        _norm("self_attn.kv_a_layernorm", mla.kv_lora_rank),
        _linear("self_attn.kv_b_proj", shape.heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank, kind),
        _linear("self_attn.o_proj", shape.hidden, shape.heads * mla.v_head_dim, kind),
    ]


def _swiglu(module: str, hidden: int, width: int, kind: LayerKind) -> list[HfTensor]:
    return [
        _linear(f"{module}.gate_proj", width, hidden, kind),
        _linear(f"{module}.up_proj", width, hidden, kind),
        _linear(f"{module}.down_proj", hidden, width, kind),
    ]


def _mixture(config: Mapping[str, Any], family: str) -> dict[str, Any]:
    """Fields of ``ModelShape`` that only some families have."""
    if family == "qwen3_moe":
        key = "num_experts" if "num_experts" in config else "num_local_experts"
        return {"experts": _size(config, key), "moe_ffn": _size(config, "moe_intermediate_size")}
    if family == "deepseek_v3":
        width = _size(config, "moe_intermediate_size")
        return {
            "experts": _size(config, "n_routed_experts"),
            "moe_ffn": width,
            "shared_ffn": width * (config.get("n_shared_experts") or 0),
            "router_bias": True,
            "mla": LatentAttention(*(_size(config, name) for name in LatentAttention.__dataclass_fields__)),
            "next_token_layers": config.get("num_nextn_predict_layers") or 0,
        }
    return {}


def _is_moe(config: Mapping[str, Any], family: str, index: int) -> bool:
    if family == "deepseek_v3":
        return index >= config.get("first_k_dense_replace", 0) and index % config.get("moe_layer_freq", 1) == 0
    if family == "qwen3_moe":
        return index not in (config.get("mlp_only_layers") or ()) and (index + 1) % config.get("decoder_sparse_step", 1) == 0
    return False


def _layer_kind(shape: ModelShape, moe: bool, index: int, fp8: Fp8Predicate) -> LayerKind:
    plain = layer_tensors(shape, LayerKind(moe))
    modules = [name.removesuffix(".weight") for name, tensor in plain.items() if tensor.kind == "linear"]
    return LayerKind(moe, frozenset(module for module in modules if not fp8(layer_prefix(index) + module)))


def _configured_predicate(config: Mapping[str, Any]) -> Fp8Predicate:
    quantization = config.get("quantization_config")
    if quantization is None:
        return lambda module: True
    block = list(quantization.get("weight_block_size") or ())
    if quantization.get("quant_method") != "fp8" or block != [TILE, TILE]:
        raise LayoutError(
            f"quantization_config has quant_method {quantization.get('quant_method')!r} and weight_block_size {block or None}, "
            f"but only block FP8 with [{TILE}, {TILE}] is laid out here: remove it to plan for the FP8 that training would use."
        )
    skipped = set(quantization.get("modules_to_not_convert") or quantization.get("ignored_layers") or ())
    return lambda module: module not in skipped


def _size(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise LayoutError(
            f"{name} is {config.get(name)!r} in config.json, but a whole number of at least 1 is needed to lay out the model."
        )
    return value


def _refuse_features(config: Mapping[str, Any], family: str) -> None:
    if config.get("attention_bias") or config.get("mlp_bias"):
        raise LayoutError("attention_bias or mlp_bias is true in config.json: these bias tensors are not laid out here.")
    if family == "deepseek_v3" and config.get("topk_method", "noaux_tc") != "noaux_tc":
        raise LayoutError(
            f"topk_method is {config['topk_method']!r}: only noaux_tc (a router with e_score_correction_bias) is laid out here."
        )
    if family == "deepseek_v3" and config.get("q_lora_rank") is None:
        raise LayoutError("q_lora_rank is null in config.json: latent attention without a query down-projection is not laid out here.")
    if family == "qwen3_moe" and config.get("shared_expert_intermediate_size"):
        raise LayoutError("shared_expert_intermediate_size is set: the gated shared expert is not laid out here.")
