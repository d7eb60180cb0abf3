"""Slow reference of the layouts: whole matrices of unique numbers, sharded as Megatron-Core does, sliced as vLLM does.

Written from the definitions with whole-array operations (reshape, concatenate, split), sharing nothing with ``e2e_fp8.layout``:

- Megatron interleaves the fused query-key-value by query group, ``[q heads of the group, k head, v head]`` for each group, and
  gives each tensor rank an equal run of its rows; ``fc1`` of a rank is its share of gate over its share of up; row-parallel
  matrices are split by columns. In the engine's order each rank stacks its heads of Q, K and V.
- Ranks count tensor fastest, then context, data, pipeline; for experts expert-tensor fastest, then expert, data, pipeline.
- Interleaved pipelining deals equal runs of layers to the stages in turn.
- vLLM stacks shares of Q, K, V (key-value heads repeated if there are too few), of gate and up, and experts.

An element carries two numbers: its own (``codes``) and that of the trainer's 128x128 tile it was quantized in (``scales``).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

EDGE = 128
Arrays = dict[str, np.ndarray]


@dataclass
class Sizes:
    """Sizes of both sides; the names are the command line's."""

    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    etp: int = 1
    dp: int = 1
    rollout_tp: int = 1
    rollout_dp: int = 1
    rollout_ep: bool = False
    order: str = "megatron"
    spec: str = "te"


def checkpoint(config: dict[str, Any]) -> Arrays:
    """Every tensor under its Hugging Face name, all elements distinct."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (vocab, hidden)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}."
        shapes |= {layer + "input_layernorm.weight": (hidden,), layer + "post_attention_layernorm.weight": (hidden,)}
        shapes |= {layer + name: shape for name, shape in _attention_shapes(config).items()}
        shapes |= {layer + name: shape for name, shape in _mlp_shapes(config, index).items()}
    found, first = {}, 0
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        found[name] = np.arange(first, first + size).reshape(shape)
        first += size
    return found


def _attention_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if config["model_type"] == "deepseek_v3":
        rank, kv_rank, rope = config["q_lora_rank"], config["kv_lora_rank"], config["qk_rope_head_dim"]
        nope, value = config["qk_nope_head_dim"], config["v_head_dim"]
        return {
            "self_attn.q_a_proj.weight": (rank, hidden),
            "self_attn.q_a_layernorm.weight": (rank,),
            "self_attn.q_b_proj.weight": (heads * (nope + rope), rank),
            "self_attn.kv_a_proj_with_mqa.weight": (kv_rank + rope, hidden),
            "self_attn.kv_a_layernorm.weight": (kv_rank,),
            "self_attn.kv_b_proj.weight": (heads * (nope + value), kv_rank),
            "self_attn.o_proj.weight": (hidden, heads * value),
        }
    width = head_dim(config)
    rows = {"q": heads * width, "k": config["num_key_value_heads"] * width, "v": config["num_key_value_heads"] * width}
    shapes: dict[str, tuple[int, ...]] = {f"self_attn.{p}_proj.weight": (n, hidden) for p, n in rows.items()}
    shapes["self_attn.o_proj.weight"] = (hidden, rows["q"])
    if config["model_type"] == "qwen2":
        shapes |= {f"self_attn.{p}_proj.bias": (n,) for p, n in rows.items()}
    if config["model_type"].startswith("qwen3"):
        shapes |= {"self_attn.q_norm.weight": (width,), "self_attn.k_norm.weight": (width,)}
    return shapes


def _mlp_shapes(config: dict[str, Any], index: int) -> dict[str, tuple[int, ...]]:
    hidden = config["hidden_size"]
    if not is_moe(config, index):
        return _ffn("mlp", hidden, config["intermediate_size"])
    experts, width = num_experts(config), config["moe_intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (experts, hidden)}
    if config["model_type"] == "deepseek_v3":
        shapes["mlp.gate.e_score_correction_bias"] = (experts,)
        shapes |= _ffn("mlp.shared_experts", hidden, width * config["n_shared_experts"])
    for expert in range(experts):
        shapes |= _ffn(f"mlp.experts.{expert}", hidden, width)
    return shapes


def _ffn(module: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{module}.gate_proj.weight": (width, hidden), f"{module}.up_proj.weight": (width, hidden)} | {
        f"{module}.down_proj.weight": (hidden, width)
    }


def head_dim(config: dict[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def num_experts(config: dict[str, Any]) -> int:
    return config.get("n_routed_experts") or config.get("num_experts") or 0


def is_moe(config: dict[str, Any], index: int) -> bool:
    return num_experts(config) > 0 and index >= config.get("first_k_dense_replace", 0)


def is_fp8(name: str) -> bool:
    """Matrices of the layers except the router, by HF, Megatron or vLLM name."""
    return not any(part in name for part in ("norm", "embed", "lm_head", "output_layer", "router", "mlp.gate.", "bias"))


def tile_numbers(matrix: np.ndarray) -> np.ndarray:
    """For every element the number of its 128x128 tile: the largest element in it."""
    found = np.empty_like(matrix)
    for row in range(0, matrix.shape[0], EDGE):
        for column in range(0, matrix.shape[1], EDGE):
            tile = matrix[row : row + EDGE, column : column + EDGE]
            found[row : row + EDGE, column : column + EDGE] = tile.max()
    return found


# ----------------------------------------------------------------------------------------------------------- Megatron


def trainer_ranks(config: dict[str, Any], hf: Arrays, sizes: Sizes) -> list[list[Arrays]]:
    """``[rank][chunk]`` -> Megatron name -> local array."""
    stage_size = sizes.tp * sizes.dp
    dense = [(pp, tp) for pp in range(sizes.pp) for _ in range(sizes.dp) for tp in range(sizes.tp)]
    expert_data = stage_size // (sizes.ep * sizes.etp)
    expert = [(ep, etp) for _ in range(sizes.pp) for _ in range(expert_data) for ep in range(sizes.ep) for etp in range(sizes.etp)]
    return [_trainer_rank(config, hf, sizes, *where, *moe) for where, moe in zip(dense, expert, strict=True)]


def _trainer_rank(config: dict[str, Any], hf: Arrays, sizes: Sizes, pp: int, tp: int, ep: int, etp: int) -> list[Arrays]:
    chunks = sizes.vpp or 1
    runs = np.split(np.arange(config["num_hidden_layers"]), sizes.pp * chunks)
    found: list[Arrays] = []
    for chunk in range(chunks):
        model: Arrays = {}
        if pp == 0 and chunk == 0:
            model["embedding.word_embeddings.weight"] = _padded_share(hf["model.embed_tokens.weight"], sizes.tp, tp, sizes.tp)
        for local, layer in enumerate(runs[chunk * sizes.pp + pp]):
            prefix = f"model.layers.{layer}."
            tensors = {name.removeprefix(prefix): array for name, array in hf.items() if name.startswith(prefix)}
            part = _trainer_layer(config, tensors, sizes, is_moe(config, int(layer)), tp, ep, etp)
            model |= {f"decoder.layers.{local}.{name}": array for name, array in part.items()}
        if pp == sizes.pp - 1 and chunk == chunks - 1:
            model["decoder.final_layernorm.weight"] = hf["model.norm.weight"]
            head = hf.get("lm_head.weight", hf["model.embed_tokens.weight"] if sizes.pp > 1 else None)
            if head is not None:
                model["output_layer.weight"] = _padded_share(head, sizes.tp, tp, sizes.tp)
        found.append(model)
    return found


def _padded_share(matrix: np.ndarray, multiple: int, index: int, count: int) -> np.ndarray:
    rows = -(-matrix.shape[0] // multiple) * multiple
    padded = np.full((rows, matrix.shape[1]), -1)
    padded[: matrix.shape[0]] = matrix
    return np.split(padded, count)[index]


def _trainer_layer(config: dict[str, Any], hf: Arrays, sizes: Sizes, moe: bool, tp: int, ep: int, etp: int) -> Arrays:
    te, fused, latent = sizes.spec != "local", sizes.spec == "te", config["model_type"] == "deepseek_v3"
    out: Arrays = {}
    out["self_attention.linear_qkv.layer_norm_weight" if fused and not latent else "input_layernorm.weight"] = hf["input_layernorm.weight"]
    out["mlp.linear_fc1.layer_norm_weight" if fused and not moe else "pre_mlp_layernorm.weight"] = hf["post_attention_layernorm.weight"]
    out["self_attention.linear_proj.weight"] = np.split(hf["self_attn.o_proj.weight"], sizes.tp, axis=1)[tp]
    if latent:
        for part, down in (("q", "q_a_proj"), ("kv", "kv_a_proj_with_mqa")):
            whole = hf[f"self_attn.{down}.weight"]
            out[f"self_attention.linear_{part}_down_proj.weight"] = whole if te else np.split(whole, sizes.tp)[tp]
            norm = f"linear_{part}_up_proj.layer_norm_weight" if te else f"{part}_layernorm.weight"
            out[f"self_attention.{norm}"] = hf[f"self_attn.{part}_a_layernorm.weight"]
            out[f"self_attention.linear_{part}_up_proj.weight"] = np.split(hf[f"self_attn.{part}_b_proj.weight"], sizes.tp)[tp]
    else:
        for suffix in ("weight", "bias"):
            if f"self_attn.q_proj.{suffix}" in hf:
                q, k, v = (hf[f"self_attn.{p}_proj.{suffix}"] for p in "qkv")
                out[f"self_attention.linear_qkv.{suffix}"] = _trainer_qkv(config, q, k, v, sizes, tp)
        for part in "qk":
            if f"self_attn.{part}_norm.weight" in hf:
                out[f"self_attention.{part}_layernorm.weight"] = hf[f"self_attn.{part}_norm.weight"]
    if not moe:
        return out | _trainer_ffn("mlp", hf, "mlp", sizes.tp, tp)
    out["mlp.router.weight"] = hf["mlp.gate.weight"]
    if latent:
        out["mlp.router.expert_bias"] = hf["mlp.gate.e_score_correction_bias"]
        out |= _trainer_ffn("mlp.shared_experts", hf, "mlp.shared_experts", sizes.tp, tp)
    for local, expert in enumerate(np.split(np.arange(num_experts(config)), sizes.ep)[ep]):
        module, suffix = ("mlp.experts", str(local)) if te else (f"mlp.experts.local_experts.{local}", "")
        out |= _trainer_ffn(module, hf, f"mlp.experts.{expert}", sizes.etp, etp, suffix)
    return out


def _trainer_qkv(config: dict[str, Any], q: np.ndarray, k: np.ndarray, v: np.ndarray, sizes: Sizes, tp: int) -> np.ndarray:
    if sizes.order == "engine":
        return np.concatenate([np.split(matrix, sizes.tp)[tp] for matrix in (q, k, v)])
    groups = config["num_key_value_heads"]
    by_group = [matrix.reshape(groups, -1, *matrix.shape[1:]) for matrix in (q, k, v)]
    fused = np.concatenate(by_group, axis=1).reshape(-1, *q.shape[1:])
    return np.split(fused, sizes.tp)[tp]


def _trainer_ffn(module: str, hf: Arrays, hf_module: str, count: int, index: int, suffix: str = "") -> Arrays:
    gate, up, down = (hf[f"{hf_module}.{p}_proj.weight"] for p in ("gate", "up", "down"))
    return {
        f"{module}.linear_fc1.weight{suffix}": np.concatenate([np.split(gate, count)[index], np.split(up, count)[index]]),
        f"{module}.linear_fc2.weight{suffix}": np.split(down, count, axis=1)[index],
    }


def scale_numbers(models: Iterable[Arrays], elements: int) -> np.ndarray:
    """Element number -> number of the tile it was quantized in, -1 outside FP8; a tile stretches over one local matrix only."""
    found = np.full(elements, -1)
    for model in models:
        for name, array in model.items():
            if array.ndim == 2 and is_fp8(name):
                found[array] = tile_numbers(array)
    return found


# --------------------------------------------------------------------------------------------------------------- vLLM


def engine_rank(config: dict[str, Any], hf: Arrays, sizes: Sizes, rank: int) -> Arrays:
    """vLLM name -> what must stand there; -1 in padding rows."""
    tp, count = rank % sizes.rollout_tp, sizes.rollout_tp
    out = {"model.norm.weight": hf["model.norm.weight"]}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in hf:
            out[name] = _padded_share(hf[name], 64, tp, count)
    for index in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{index}."
        tensors = {name.removeprefix(prefix): array for name, array in hf.items() if name.startswith(prefix)}
        layer = _engine_attention(config, tensors, count, tp)
        layer |= _engine_mlp(config, tensors, sizes, rank, is_moe(config, index))
        out |= {prefix + name: array for name, array in layer.items()}
    return out


def _engine_attention(config: dict[str, Any], hf: Arrays, count: int, tp: int) -> Arrays:
    kept = ("input_layernorm", "post_attention_layernorm", "q_norm", "k_norm", "q_a_layernorm", "kv_a_layernorm")
    out = {name: array for name, array in hf.items() if name.split(".")[-2] in kept}
    out["self_attn.o_proj.weight"] = np.split(hf["self_attn.o_proj.weight"], count, axis=1)[tp]
    if config["model_type"] == "deepseek_v3":
        out["self_attn.fused_qkv_a_proj.weight"] = np.concatenate(
            [hf["self_attn.q_a_proj.weight"], hf["self_attn.kv_a_proj_with_mqa.weight"]]
        )
        for part in ("q", "kv"):
            out[f"self_attn.{part}_b_proj.weight"] = np.split(hf[f"self_attn.{part}_b_proj.weight"], count)[tp]
        return out
    groups = config["num_key_value_heads"]
    repeats = max(1, count // groups)
    for suffix in ("weight", "bias"):
        if f"self_attn.q_proj.{suffix}" in hf:
            q, k, v = (hf[f"self_attn.{p}_proj.{suffix}"] for p in "qkv")
            # rank r of a repeated head: r // repeats, of as many shares as there are heads
            shares = [np.split(q, count)[tp], *(np.split(m, min(count, groups))[tp // repeats] for m in (k, v))]
            out[f"self_attn.qkv_proj.{suffix}"] = np.concatenate(shares)
    return out


def _engine_mlp(config: dict[str, Any], hf: Arrays, sizes: Sizes, rank: int, moe: bool) -> Arrays:
    tp, count = rank % sizes.rollout_tp, sizes.rollout_tp
    if not moe:
        return _engine_ffn("mlp", hf, count, tp)
    out = {name: array for name, array in hf.items() if name.startswith("mlp.gate.")}
    engine_size = sizes.rollout_tp * sizes.rollout_dp
    if "mlp.shared_experts.up_proj.weight" in hf:
        replicated = sizes.rollout_ep and sizes.rollout_tp > 1 and sizes.rollout_dp > 1
        out |= _engine_ffn("mlp.shared_experts", hf, *((1, 0) if replicated else (count, tp)))
    whole = sizes.rollout_ep and engine_size > 1
    every = np.arange(num_experts(config))
    mine = np.array_split(every, engine_size)[rank] if whole else every
    parts = [_engine_ffn(f"mlp.experts.{e}", hf, *((1, 0) if whole else (engine_size, rank))) for e in mine]
    for ours, theirs in (("w13_weight", "gate_up_proj"), ("w2_weight", "down_proj")):
        out[f"mlp.experts.routed_experts.{ours}"] = np.stack(
            [p[f"mlp.experts.{e}.{theirs}.weight"] for e, p in zip(mine, parts, strict=True)]
        )
    return out


def _engine_ffn(module: str, hf: Arrays, count: int, index: int) -> Arrays:
    gate, up, down = (hf[f"{module}.{p}_proj.weight"] for p in ("gate", "up", "down"))
    return {
        f"{module}.gate_up_proj.weight": np.concatenate([np.split(gate, count)[index], np.split(up, count)[index]]),
        f"{module}.down_proj.weight": np.split(down, count, axis=1)[index],
    }
