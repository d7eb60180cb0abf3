"""Slow reference of what each trainer rank holds, row by row from the definitions; shares no code with the package.

Definitions (Megatron-Core, order ``tp-cp-ep-dp-pp``; this project's order of ``linear_qkv``):
- ranks are numbered through all (pipeline, data, context, tensor), tensor fastest; experts number the same ranks through all
  (pipeline, expert data, expert, expert tensor);
- a tensor rank holds an equal, consecutive share of the query heads, of the key/value heads, of the feed-forward channels, of
  the vocabulary; ``linear_qkv`` lists its q, then k, then v rows, ``linear_fc1`` its gate, then up rows;
- output projections hold the columns that belong to those heads or channels;
- an expert rank holds consecutive whole experts, an expert-tensor rank a share of their channels;
- layers are cut into pipeline x virtual chunks, dealt to the pipeline ranks in rounds.
"""

from itertools import product

import numpy as np

Row = tuple[str, int, int, int]
"""Hugging Face tensor, its row, first column, last column + 1. A vector has one column."""


def coordinates(world: int, sizes: dict[str, int]) -> list[dict[str, int]]:
    """Of every rank, by counting through the grids."""
    names = ("tensor", "context", "pipeline", "expert", "expert_tensor")
    tensor, context, pipeline, expert, expert_tensor = (sizes.get(n, 1) for n in names)
    stage = world // pipeline
    dense = list(product(range(pipeline), range(stage // (tensor * context)), range(context), range(tensor)))
    routed = list(product(range(pipeline), range(stage // (expert * expert_tensor)), range(expert), range(expert_tensor)))
    return [
        {"pipeline": pp, "data": dp, "context": cp, "tensor": tp, "expert": ep, "expert_tensor": etp}
        for (pp, dp, cp, tp), (_, _, ep, etp) in zip(dense, routed, strict=True)
    ]


def shapes(model: dict) -> dict[str, tuple[int, int]]:
    """Rows and columns of every Hugging Face tensor."""
    hidden, width = model["hidden_size"], model["head_dim"]
    q, kv = model["num_attention_heads"] * width, model["num_key_value_heads"] * width
    found = {name: (model["vocab_size"], hidden) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    found["model.norm.weight"] = (hidden, 1)
    for layer in range(model["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        found |= {at + n: (hidden, 1) for n in ("input_layernorm.weight", "post_attention_layernorm.weight")}
        found |= {f"{at}self_attn.{p}_norm.weight": (width, 1) for p in "qk"}
        found |= {f"{at}self_attn.{p}_proj.weight": (q if p == "q" else kv, hidden) for p in "qkv"}
        found[at + "self_attn.o_proj.weight"] = (hidden, q)
        blocks, ffn = ["mlp."], model["intermediate_size"]
        if model["architecture"] == "qwen3_moe":
            found[at + "mlp.gate.weight"] = (model["num_experts"], hidden)
            blocks, ffn = [f"mlp.experts.{e}." for e in range(model["num_experts"])], model["moe_intermediate_size"]
        for block in blocks:
            found |= {f"{at}{block}{p}_proj.weight": (ffn, hidden) for p in ("gate", "up")}
            found[f"{at}{block}down_proj.weight"] = (hidden, ffn)
    return found


def rank_rows(model: dict, sizes: dict[str, int], place: dict[str, int]) -> dict[str, list[Row]]:
    """Every parameter of one rank, named with the layer and expert numbers of the whole model, as its list of rows."""
    size = shapes(model)

    def whole(name: str) -> list[Row]:
        return [(name, row, 0, size[name][1]) for row in range(size[name][0])]

    def some_rows(name: str, index: int, count: int) -> list[Row]:
        each = size[name][0] // count
        return [(name, row, 0, size[name][1]) for row in range(index * each, index * each + each)]

    def some_columns(name: str, index: int, count: int) -> list[Row]:
        each = size[name][1] // count
        return [(name, row, index * each, index * each + each) for row in range(size[name][0])]

    stages, rounds = sizes.get("pipeline", 1), sizes.get("virtual_pipeline", 1)
    tp = (place["tensor"], sizes.get("tensor", 1))
    etp = (place["expert_tensor"], sizes.get("expert_tensor", 1))
    found = {}
    if place["pipeline"] == 0:
        found["embedding.word_embeddings.weight"] = some_rows("model.embed_tokens.weight", *tp)
    each = model["num_hidden_layers"] // (stages * rounds)
    for layer in range(model["num_hidden_layers"]):
        if (layer // each) % stages != place["pipeline"]:
            continue
        ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        found[ours + "input_layernorm.weight"] = whole(theirs + "input_layernorm.weight")
        found[ours + "pre_mlp_layernorm.weight"] = whole(theirs + "post_attention_layernorm.weight")
        for p in "qk":
            found[f"{ours}self_attention.{p}_layernorm.weight"] = whole(f"{theirs}self_attn.{p}_norm.weight")
        qkv = [some_rows(f"{theirs}self_attn.{p}_proj.weight", *tp) for p in "qkv"]
        found[ours + "self_attention.linear_qkv.weight"] = qkv[0] + qkv[1] + qkv[2]
        found[ours + "self_attention.linear_proj.weight"] = some_columns(theirs + "self_attn.o_proj.weight", *tp)
        blocks = [(ours + "mlp.", theirs + "mlp.", tp)]
        if model["architecture"] == "qwen3_moe":
            found[ours + "mlp.router.weight"] = whole(theirs + "mlp.gate.weight")
            local = model["num_experts"] // sizes.get("expert", 1)
            experts = range(place["expert"] * local, place["expert"] * local + local)
            blocks = [(f"{ours}mlp.experts.local_experts.{e}.", f"{theirs}mlp.experts.{e}.", etp) for e in experts]
        for a, b, share in blocks:
            found[a + "linear_fc1.weight"] = some_rows(b + "gate_proj.weight", *share) + some_rows(b + "up_proj.weight", *share)
            found[a + "linear_fc2.weight"] = some_columns(b + "down_proj.weight", *share)
    if place["pipeline"] == stages - 1:
        found["decoder.final_layernorm.weight"] = whole("model.norm.weight")
        found["output_layer.weight"] = some_rows("lm_head.weight", *tp)
    return found


def cut(hf: dict[str, np.ndarray], rows: list[Row]) -> np.ndarray:
    """The parameter made of these rows."""
    return np.stack([hf[name].reshape(hf[name].shape[0], -1)[row, first:last] for name, row, first, last in rows])


def cut_scales(hf: dict[str, np.ndarray], rows: list[Row]) -> np.ndarray:
    """Its scale tiles, from those of the whole tensors; every 128 rows must be one row of tiles of one tensor."""
    found = []
    for start in range(0, len(rows), 128):
        tile = rows[start : start + 128]
        name, row, first, last = tile[0]
        assert [r[:2] for r in tile] == [(name, row + i) for i in range(len(tile))]
        assert row % 128 == first % 128 == last % 128 == 0
        found.append(hf[name][row // 128, first // 128 : last // 128])
    return np.stack(found)


def gather(held: list[dict[str, np.ndarray]], model: dict, sizes: dict[str, int]) -> dict[str, np.ndarray]:
    """Whole Hugging Face tensors from what all ranks hold; ranks that hold the same element must agree on its bits."""
    found = {name: np.zeros(shape, next(iter(held[0].values())).dtype) for name, shape in shapes(model).items()}
    filled = {name: np.zeros(shape, bool) for name, shape in shapes(model).items()}
    for place, parameters in zip(coordinates(len(held), sizes), held, strict=True):
        rows_of = rank_rows(model, sizes, place)
        assert rows_of.keys() == parameters.keys(), (place, rows_of.keys() ^ parameters.keys())
        for name, rows in rows_of.items():
            for (hf_name, row, first, last), values in zip(rows, parameters[name].reshape(len(rows), -1), strict=True):
                if filled[hf_name][row, first:last].any():
                    assert np.array_equal(found[hf_name][row, first:last], values), (name, hf_name, row)
                found[hf_name][row, first:last] = values
                filled[hf_name][row, first:last] = True
    assert all(f.all() for f in filled.values())
    return found
