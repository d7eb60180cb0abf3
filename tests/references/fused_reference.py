"""Slow reference of vLLM's fused, tensor-parallel parameters: concatenate whole HF tensors by hand, then cut the rank's piece.

Written from vLLM's documented layouts alone: q, k, v and gate, up one below the other, experts stacked; column-parallel layers
cut by rows of each part, row-parallel ones by columns, embeddings by padded rows.
"""

from collections.abc import Sequence

import torch


def _rows(weight: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    return weight.view(torch.uint8 if weight.element_size() == 1 else weight.dtype).chunk(size, dim=0)[rank]


def _columns(weight: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    return weight.view(torch.uint8 if weight.element_size() == 1 else weight.dtype).chunk(size, dim=1)[rank]


def fused_fp8(
    config: dict,
    weights: dict[str, torch.Tensor],
    rank: int,
    size: int,
    *,
    expert: bool = False,
    kinds: Sequence[str] = ("weight", "weight_scale_inv"),
) -> dict[str, torch.Tensor]:
    """vLLM parameter name -> bytes (uint8 for FP8 codes, float32 for scales) of every FP8 layer at one rank.

    With ``expert`` each rank holds an equal number of neighbouring experts, whole.
    """
    found: dict[str, torch.Tensor] = {}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for kind in kinds:

            def get(module: str, kind: str = kind, prefix: str = prefix) -> torch.Tensor:
                return weights[f"{prefix}{module}.{kind}"]

            kv_size = min(size, config["num_key_value_heads"])
            kv_rank = rank * kv_size // size
            qkv = [_rows(get("self_attn.q_proj"), rank, size)]
            qkv += [_rows(get(f"self_attn.{n}_proj"), kv_rank, kv_size) for n in "kv"]
            found[f"{prefix}self_attn.qkv_proj.{kind}"] = torch.cat(qkv)
            found[f"{prefix}self_attn.o_proj.{kind}"] = _columns(get("self_attn.o_proj"), rank, size)
            if config["model_type"] == "qwen3":
                gate_up = [_rows(get(f"mlp.{n}_proj"), rank, size) for n in ("gate", "up")]
                found[f"{prefix}mlp.gate_up_proj.{kind}"] = torch.cat(gate_up)
                found[f"{prefix}mlp.down_proj.{kind}"] = _columns(get("mlp.down_proj"), rank, size)
                continue
            w13, w2 = [], []
            each = config["num_experts"] // size if expert else config["num_experts"]
            cut = (0, 1) if expert else (rank, size)
            for e in range(rank * each, rank * each + each) if expert else range(each):
                w13.append(torch.cat([_rows(get(f"mlp.experts.{e}.{n}_proj"), *cut) for n in ("gate", "up")]))
                w2.append(_columns(get(f"mlp.experts.{e}.down_proj"), *cut))
            found[f"{prefix}mlp.experts.routed_experts.w13_{kind}"] = torch.stack(w13)
            found[f"{prefix}mlp.experts.routed_experts.w2_{kind}"] = torch.stack(w2)
    return found
