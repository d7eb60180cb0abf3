"""What each Megatron-Core rank holds of each Hugging Face tensor: names of both specs, both orders of the fused query-key-value."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from e2e_fp8.errors import LayoutError
from e2e_fp8.layout.engine import engine_qkv
from e2e_fp8.layout.families import Fp8Predicate, HfTensor, LayerKind, ModelShape, layer_prefix, layer_tensors, model_shape, top_tensors
from e2e_fp8.layout.parallel import MegatronParallel, MegatronRank
from e2e_fp8.layout.shards import Piece, ShardedParameter, joined, share, split_columns, split_rows, split_vocabulary, whole, window

Spec = Literal["te", "te_norms", "local"]
"""Names of Transformer Engine's layers; the same with norms beside the linears, not inside; names of Megatron's local layers."""
QkvOrder = Literal["megatron", "engine"]

_Tensors = Mapping[str, HfTensor]


def megatron_shards(
    hf_config: Mapping[str, Any],
    parallel: MegatronParallel,
    rank: int,
    *,
    qkv_order: QkvOrder = "megatron",
    spec: Spec = "te",
    fp8: Fp8Predicate | None = None,
) -> list[ShardedParameter]:
    """Every parameter of trainer rank ``rank``, in the order of its model chunks and layers.

    ``qkv_order`` is the order of rows in ``linear_qkv``: Megatron's own, by query group (q heads, k, v; q heads, k, v; ...), or
    the engine's, ``[Q | K | V]`` within each rank. ``spec`` chooses the names. The router's ``expert_bias`` is a buffer in Megatron and
    listed like a parameter.

    Raises:
        LayoutError: the model is unknown, or its sizes do not divide by the parallel sizes.
    """
    shape = model_shape(hf_config, fp8)
    place = parallel.coordinates(rank)
    top, templates = top_parameters(shape, parallel, place), {}
    chunks = parallel.stage_layers(place.pipeline, shape.layers)
    found: list[ShardedParameter] = []
    for chunk, layers in enumerate(chunks):
        if chunk == 0:
            found += [p for p in top if p.name.startswith("embedding.")]
        for local, layer in enumerate(layers):
            kind = shape.kinds[layer]
            if kind not in templates:
                templates[kind] = list(layer_parameters(shape, kind, parallel, place, qkv_order, spec))
            prefix = f"decoder.layers.{local}."
            found += [p.placed(prefix, layer_prefix(layer), layer=layer, chunk=chunk) for p in templates[kind]]
        if chunk == len(chunks) - 1:
            found += [p.placed("", "", layer=None, chunk=chunk) for p in top if not p.name.startswith("embedding.")]
    return found


VALUE_HEAD = "score.weight"
"""Hugging Face name of the head of a value model, ``[1, hidden]`` (that of its sequence classifiers)."""


def value_model_shards(policy: Sequence[ShardedParameter], hidden: int) -> list[ShardedParameter]:
    """A rank's parameters of the value model of the same sizes: one row on every tensor rank in place of the untied output head."""
    row = whole("output_layer.weight", HfTensor(VALUE_HEAD, (1, hidden), "value_head"))
    return [replace(row, chunk=p.chunk) if p.name == row.name else p for p in policy]


def layer_parameters(
    shape: ModelShape,
    kind: LayerKind,
    parallel: MegatronParallel,
    place: MegatronRank,
    qkv_order: QkvOrder,
    spec: Spec,
    *,
    experts: bool | None = None,
) -> Iterator[ShardedParameter]:
    """Parameters of one layer under relative names on both sides; only the routed experts, or all others, if ``experts`` is given."""
    tensors = layer_tensors(shape, kind)
    if experts is not True:
        yield from _dense_parameters(shape, kind, tensors, parallel, place, qkv_order, spec)
    if experts is not False and kind.moe:
        first, last = share(shape.experts, place.expert, parallel.expert, "The experts")
        for local, expert in enumerate(range(first, last)):
            yield from _expert(local, expert, tensors, parallel, place, spec)


def _dense_parameters(
    shape: ModelShape,
    kind: LayerKind,
    tensors: _Tensors,
    parallel: MegatronParallel,
    place: MegatronRank,
    qkv_order: QkvOrder,
    spec: Spec,
) -> Iterator[ShardedParameter]:
    yield from _norms(shape, kind, tensors, spec)
    if shape.mla:
        yield from _latent_attention(tensors, parallel, place, spec)
    else:
        yield from _attention(shape, tensors, parallel, place, qkv_order)
    if not kind.moe:
        yield from _swiglu("mlp", "mlp", tensors, place.tensor, parallel.tensor)
        return
    yield whole("mlp.router.weight", tensors["mlp.gate.weight"])
    if shape.router_bias:
        yield whole("mlp.router.expert_bias", tensors["mlp.gate.e_score_correction_bias"])
    if shape.shared_ffn:
        yield from _swiglu("mlp.shared_experts", "mlp.shared_experts", tensors, place.tensor, parallel.tensor)


def top_parameters(shape: ModelShape, parallel: MegatronParallel, place: MegatronRank) -> list[ShardedParameter]:
    """Embedding (first stage), final norm and head (last stage). A tied head is a copy of the embedding on a last stage of its own."""
    tensors, found = top_tensors(shape), []
    multiple = parallel.vocab_multiple * parallel.tensor
    padded = -(-shape.vocab // multiple) * multiple
    embedding, head = tensors["model.embed_tokens.weight"], tensors.get("lm_head.weight")
    is_last = place.pipeline == parallel.pipeline - 1
    if place.pipeline == 0:
        found.append(split_vocabulary("embedding.word_embeddings.weight", embedding, place.tensor, parallel.tensor, padded))
    if is_last:
        found.append(whole("decoder.final_layernorm.weight", tensors["model.norm.weight"]))
        if head or parallel.pipeline > 1:
            found.append(split_vocabulary("output_layer.weight", head or embedding, place.tensor, parallel.tensor, padded))
    return found


def _norms(shape: ModelShape, kind: LayerKind, tensors: _Tensors, spec: Spec) -> Iterator[ShardedParameter]:
    fused = spec == "te"
    into_qkv = fused and shape.mla is None
    yield whole("self_attention.linear_qkv.layer_norm_weight" if into_qkv else "input_layernorm.weight", tensors["input_layernorm.weight"])
    into_fc1 = fused and not kind.moe
    yield whole("mlp.linear_fc1.layer_norm_weight" if into_fc1 else "pre_mlp_layernorm.weight", tensors["post_attention_layernorm.weight"])


def _attention(
    shape: ModelShape, tensors: _Tensors, parallel: MegatronParallel, place: MegatronRank, qkv_order: QkvOrder
) -> Iterator[ShardedParameter]:
    for suffix in ("weight", "bias") if shape.qkv_bias else ("weight",):
        pieces = _qkv_pieces(shape, tensors, suffix, parallel, place, qkv_order)
        yield joined(f"self_attention.linear_qkv.{suffix}", pieces)
    if shape.qk_norm:
        for part in "qk":
            yield whole(f"self_attention.{part}_layernorm.weight", tensors[f"self_attn.{part}_norm.weight"])
    yield split_columns("self_attention.linear_proj.weight", tensors["self_attn.o_proj.weight"], place.tensor, parallel.tensor)


def _qkv_pieces(
    shape: ModelShape, tensors: _Tensors, suffix: str, parallel: MegatronParallel, place: MegatronRank, qkv_order: QkvOrder
) -> list[Piece]:
    size, groups, width = parallel.tensor, shape.kv_heads, shape.head_dim
    share(shape.heads, place.tensor, size, "The query heads")
    if groups % size and size % groups:
        raise LayoutError(f"Training tensor size {size} neither divides nor is a multiple of the {groups} key-value heads: choose another.")
    if qkv_order == "engine":
        if size > groups:
            raise LayoutError(
                f"Training tensor size {size} is above the {groups} key-value heads: in the engine's order each rank would own a copy of "
                f"one, which Megatron does not keep. Use a tensor size of at most {groups}, or the order 'megatron'."
            )
        return engine_qkv(shape, tensors, suffix, place.tensor, size)
    q, k, v = (tensors[f"self_attn.{part}_proj.{suffix}"] for part in "qkv")
    per_group = shape.heads // groups * width
    pieces: list[Piece] = []
    for group in range(groups):
        pieces.append((q, (group * per_group, (group + 1) * per_group)))
        pieces += [(one, (group * width, (group + 1) * width)) for one in (k, v)]
    return window(pieces, *share(groups * (per_group + 2 * width), place.tensor, size, "linear_qkv"))


def _latent_attention(tensors: _Tensors, parallel: MegatronParallel, place: MegatronRank, spec: Spec) -> Iterator[ShardedParameter]:
    index, size = place.tensor, parallel.tensor
    for ours, side in (("q", "q"), ("kv", "kv")):
        down = tensors["self_attn.q_a_proj.weight" if side == "q" else "self_attn.kv_a_proj_with_mqa.weight"]
        name = f"self_attention.linear_{ours}_down_proj.weight"
        # Transformer Engine's layer is a duplicate on every rank, the local one is column-parallel with a gather
        yield whole(name, down) if spec != "local" else split_rows(name, [down], index, size)
        norm = f"linear_{ours}_up_proj.layer_norm_weight" if spec != "local" else f"{ours}_layernorm.weight"
        yield whole(f"self_attention.{norm}", tensors[f"self_attn.{side}_a_layernorm.weight"])
        yield split_rows(f"self_attention.linear_{ours}_up_proj.weight", [tensors[f"self_attn.{side}_b_proj.weight"]], index, size)
    yield split_columns("self_attention.linear_proj.weight", tensors["self_attn.o_proj.weight"], index, size)


def _swiglu(name: str, hf_module: str, tensors: _Tensors, index: int, size: int, suffix: str = "") -> Iterator[ShardedParameter]:
    gate, up, down = (tensors[f"{hf_module}.{part}_proj.weight"] for part in ("gate", "up", "down"))
    yield split_rows(f"{name}.linear_fc1.weight{suffix}", [gate, up], index, size)
    yield split_columns(f"{name}.linear_fc2.weight{suffix}", down, index, size)


def _expert(
    local: int, expert: int, tensors: _Tensors, parallel: MegatronParallel, place: MegatronRank, spec: Spec
) -> Iterator[ShardedParameter]:
    name, suffix = ("mlp.experts", str(local)) if spec != "local" else (f"mlp.experts.local_experts.{local}", "")
    for one in _swiglu(name, f"mlp.experts.{expert}", tensors, place.expert_tensor, parallel.expert_tensor_size, suffix):
        yield ShardedParameter(one.name, one.shape, one.parts, one.fp8, one.kind, expert=expert)
