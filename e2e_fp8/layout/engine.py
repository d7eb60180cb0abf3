"""What each vLLM 0.26 rank holds of each Hugging Face tensor, in the layout the kernels read.

vLLM stacks ``q_proj``, ``k_proj``, ``v_proj`` into ``qkv_proj``, ``gate_proj`` and ``up_proj`` into ``gate_up_proj``, DeepSeek's
``q_a_proj`` and ``kv_a_proj_with_mqa`` into ``fused_qkv_a_proj``, and experts into ``w13_weight`` ``[experts, 2 I, H]`` and
``w2_weight`` ``[experts, H, I]``. Block scales lie beside them, one for each 128x128 tile of the *stacked local* matrix.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from e2e_fp8.errors import LayoutError
from e2e_fp8.layout.families import Fp8Predicate, HfTensor, LayerKind, ModelShape, layer_prefix, layer_tensors, model_shape, top_tensors
from e2e_fp8.layout.parallel import EngineParallel, EngineRank
from e2e_fp8.layout.shards import Piece, ShardedParameter, joined, share, split_columns, split_rows, split_vocabulary, stacked, whole

VOCAB_MULTIPLE = 64
"""vLLM pads the rows of the embedding and of the head to this, whatever the tensor parallel size."""

_Tensors = Mapping[str, HfTensor]


def engine_shards(
    hf_config: Mapping[str, Any], parallel: EngineParallel, rank: int, *, fp8: Fp8Predicate | None = None
) -> list[ShardedParameter]:
    """Every parameter of engine rank ``rank``, without the ``weight_scale_inv`` that each FP8 one has beside it.

    Raises:
        LayoutError: the model is unknown, or its sizes do not divide by the parallel sizes.
    """
    shape = model_shape(hf_config, fp8)
    check_expert_ranks(shape, parallel)
    place = parallel.coordinates(rank)
    templates: dict[LayerKind, list[ShardedParameter]] = {}
    top = top_parameters(shape, parallel, place)
    found = top[:1]
    for index, kind in enumerate(shape.kinds):
        if kind not in templates:
            templates[kind] = list(layer_parameters(shape, kind, parallel, place))
        found += [p.placed(layer_prefix(index), layer_prefix(index), layer=index) for p in templates[kind]]
    return found + top[1:]


def check_expert_ranks(shape: ModelShape, parallel: EngineParallel) -> None:
    """Raise LayoutError when whole experts are dealt out to more ranks than there are experts."""
    if parallel.expert and 0 < shape.experts < parallel.engine_size:
        raise LayoutError(f"{shape.experts} experts cannot be dealt out to the {parallel.engine_size} ranks of an engine: use fewer.")


def scale_name(parameter: str) -> str:
    """vLLM's parameter with the block scales of ``parameter``."""
    return f"{parameter}_scale_inv"


def layer_parameters(
    shape: ModelShape, kind: LayerKind, parallel: EngineParallel, place: EngineRank, *, experts: bool | None = None
) -> Iterator[ShardedParameter]:
    """Parameters of one layer under relative names on both sides; only the routed experts, or all others, if ``experts`` is given."""
    tensors = layer_tensors(shape, kind)
    if experts is not True:
        yield from _dense_parameters(shape, kind, parallel, tensors, place.tensor)
    if experts is not False and kind.moe:
        yield from _experts(shape, tensors, parallel, place)


def _dense_parameters(
    shape: ModelShape, kind: LayerKind, parallel: EngineParallel, tensors: _Tensors, index: int
) -> Iterator[ShardedParameter]:
    size = parallel.tensor
    for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
        yield whole(name, tensors[name])
    if shape.mla:
        yield from _latent_attention(tensors, index, size)
    else:
        yield from _attention(shape, tensors, index, size)
    if not kind.moe:
        yield from _swiglu("mlp", tensors, index, size)
        return
    yield whole("mlp.gate.weight", tensors["mlp.gate.weight"])
    if shape.router_bias:
        yield whole("mlp.gate.e_score_correction_bias", tensors["mlp.gate.e_score_correction_bias"])
    if shape.shared_ffn:
        yield from _swiglu("mlp.shared_experts", tensors, *((index, size) if parallel.splits_shared_experts else (0, 1)))


def top_parameters(shape: ModelShape, parallel: EngineParallel, place: EngineRank) -> list[ShardedParameter]:
    """Embedding, final norm and head; a tied head is the embedding itself."""
    tensors = top_tensors(shape)
    padded = -(-shape.vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    return [
        whole(name, tensor) if tensor.kind == "norm" else split_vocabulary(name, tensor, place.tensor, parallel.tensor, padded)
        for name, tensor in tensors.items()
    ]


def engine_qkv(shape: ModelShape, tensors: _Tensors, suffix: str, index: int, size: int) -> list[Piece]:
    """``[Q | K | V]`` of one rank; with more ranks than key-value heads, neighbouring ranks repeat one head.

    Raises LayoutError when the heads do not divide.
    """
    groups = shape.kv_heads
    if groups % size and size % groups:
        raise LayoutError(f"Tensor size {size} neither divides nor is a multiple of the {groups} key-value heads: choose another.")
    shards = min(groups, size)
    pieces: list[Piece] = []
    for part, heads, at, count in (("q", shape.heads, index, size), *((p, groups, index * shards // size, shards) for p in "kv")):
        first, last = share(heads, at, count, f"The heads of {part}_proj")
        pieces.append((tensors[f"self_attn.{part}_proj.{suffix}"], (first * shape.head_dim, last * shape.head_dim)))
    return pieces


def local_experts(experts: int, index: int, count: int) -> range:
    """Experts of the ``index``-th of ``count`` ranks: neighbours, the first ranks one more when they do not divide."""
    each, rest = divmod(experts, count)
    first = index * each + min(index, rest)
    return range(first, first + each + (index < rest))


def _attention(shape: ModelShape, tensors: _Tensors, index: int, size: int) -> Iterator[ShardedParameter]:
    for suffix in ("weight", "bias") if shape.qkv_bias else ("weight",):
        yield joined(f"self_attn.qkv_proj.{suffix}", engine_qkv(shape, tensors, suffix, index, size))
    yield split_columns("self_attn.o_proj.weight", tensors["self_attn.o_proj.weight"], index, size)
    if shape.qk_norm:
        for part in "qk":
            yield whole(f"self_attn.{part}_norm.weight", tensors[f"self_attn.{part}_norm.weight"])


def _latent_attention(tensors: _Tensors, index: int, size: int) -> Iterator[ShardedParameter]:
    down = tensors["self_attn.q_a_proj.weight"], tensors["self_attn.kv_a_proj_with_mqa.weight"]
    yield whole("self_attn.fused_qkv_a_proj.weight", *down)
    for part in ("q", "kv"):
        norm, up = f"self_attn.{part}_a_layernorm.weight", f"self_attn.{part}_b_proj.weight"
        yield whole(norm, tensors[norm])
        yield split_rows(up, [tensors[up]], index, size)
    yield split_columns("self_attn.o_proj.weight", tensors["self_attn.o_proj.weight"], index, size)


def _swiglu(module: str, tensors: _Tensors, index: int, size: int) -> Iterator[ShardedParameter]:
    gate, up, down = (tensors[f"{module}.{part}_proj.weight"] for part in ("gate", "up", "down"))
    yield split_rows(f"{module}.gate_up_proj.weight", [gate, up], index, size)
    yield split_columns(f"{module}.down_proj.weight", down, index, size)


def _experts(shape: ModelShape, tensors: _Tensors, parallel: EngineParallel, place: EngineRank) -> Iterator[ShardedParameter]:
    whole_experts = parallel.expert and parallel.engine_size > 1
    chosen = local_experts(shape.experts, place.expert, parallel.engine_size) if whole_experts else range(shape.experts)
    index, size = (0, 1) if whole_experts else (place.expert, parallel.engine_size)
    gate_up, down = [], []
    for expert in chosen:
        one = _swiglu(f"mlp.experts.{expert}", tensors, index, size)
        gate_up.append(next(one))
        down.append(next(one))
    yield stacked("mlp.experts.routed_experts.w13_weight", gate_up)
    yield stacked("mlp.experts.routed_experts.w2_weight", down)
