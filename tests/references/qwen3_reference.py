"""Slow Qwen3 / Qwen3-MoE forward pass in FP32, written from the model's definition and sharing no code with the project.

FP8 linear layers multiply dequantized weights with activations that went through E4M3 in 1x128 tiles. Intermediate
results are not rounded to BF16, so agreement with a BF16 engine is statistical, not exact.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

PRECISION = torch.float32
"""Of everything that is not quantized; tests of gradients set float64."""


def _real(x: torch.Tensor) -> torch.Tensor:
    return x.to(PRECISION)


def through_e4m3(x: torch.Tensor, power_2_scale: bool = False) -> torch.Tensor:
    """``x`` ``[..., K]`` quantized to E4M3 with one scale for 128 neighbours (rounded up to a power of two or not), and dequantized."""
    tiles = x.float().reshape(*x.shape[:-1], -1, 128)
    step = tiles.abs().amax(-1, keepdim=True) / 448
    step = torch.where(step == 0, torch.ones_like(step), step)
    step = torch.exp2(torch.log2(step).ceil()) if power_2_scale else step
    return ((tiles / step).clamp(-448, 448).to(torch.float8_e4m3fn).float() * step).reshape(x.shape)


def _linear(weights: Mapping[str, torch.Tensor], module: str, x: torch.Tensor) -> torch.Tensor:
    weight = _real(weights[f"{module}.weight"])
    scale_inv = weights.get(f"{module}.weight_scale_inv")
    if scale_inv is None:
        return x @ weight.T
    whole = scale_inv.repeat_interleave(128, 0).repeat_interleave(128, 1)[: weight.shape[0], : weight.shape[1]]
    return through_e4m3(x, bool(weights.get("power_2_scale"))) @ (weight * whole).T


def _norm(weight: torch.Tensor, x: torch.Tensor, eps: float) -> torch.Tensor:
    return _real(weight) * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def _rotate(x_TnD: torch.Tensor, theta: float) -> torch.Tensor:
    width = x_TnD.shape[-1]
    angle = torch.arange(x_TnD.shape[0])[:, None] / theta ** (_real(torch.arange(0, width, 2)) / width)
    cos, sin = _real(angle.cos())[:, None], _real(angle.sin())[:, None]
    first, second = x_TnD.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def _attention(config: Mapping[str, Any], weights: Mapping[str, torch.Tensor], layer: str, x: torch.Tensor) -> torch.Tensor:
    tokens, width, eps = x.shape[0], config["head_dim"], config["rms_norm_eps"]
    query, key, value = (_linear(weights, f"{layer}.self_attn.{n}_proj", x).view(tokens, -1, width) for n in "qkv")
    query = _rotate(_norm(weights[f"{layer}.self_attn.q_norm.weight"], query, eps), config["rope_theta"])
    key = _rotate(_norm(weights[f"{layer}.self_attn.k_norm.weight"], key, eps), config["rope_theta"])
    repeat = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    logits = torch.einsum("qnd,knd->nqk", query, key) / width**0.5
    logits = logits.masked_fill(torch.ones(tokens, tokens, dtype=torch.bool).triu(1), float("-inf"))
    mixed = torch.einsum("nqk,knd->qnd", logits.softmax(-1), value).reshape(tokens, -1)
    return _linear(weights, f"{layer}.self_attn.o_proj", mixed)


def _swiglu(weights: Mapping[str, torch.Tensor], block: str, x: torch.Tensor) -> torch.Tensor:
    gate, up = _linear(weights, f"{block}.gate_proj", x), _linear(weights, f"{block}.up_proj", x)
    return _linear(weights, f"{block}.down_proj", gate * gate.sigmoid() * up)


def _experts(
    config: Mapping[str, Any], weights: Mapping[str, torch.Tensor], layer: str, x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    probabilities = _linear(weights, f"{layer}.mlp.gate", x).softmax(-1)
    chosen, ids = probabilities.topk(config["num_experts_per_tok"], -1)
    if config["norm_topk_prob"]:
        chosen = chosen / chosen.sum(-1, keepdim=True)
    rows = []
    for token in range(x.shape[0]):
        parts = [p * _swiglu(weights, f"{layer}.mlp.experts.{int(e)}", x[token]) for p, e in zip(chosen[token], ids[token], strict=True)]
        rows.append(torch.stack(parts).sum(0))
    return torch.stack(rows), ids


def forward(
    config: Mapping[str, Any], weights: Mapping[str, torch.Tensor], token_ids: list[int]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """FP32 logits ``[T, vocabulary]`` of one sequence, and for a mixture of experts the expert ids ``[T, L, k]``.

    A non-zero entry ``power_2_scale`` of ``weights`` rounds activation scales up to powers of two.
    """
    x, routed = _real(weights["model.embed_tokens.weight"])[torch.tensor(token_ids)], []
    for index in range(config["num_hidden_layers"]):
        layer, eps = f"model.layers.{index}", config["rms_norm_eps"]
        x = x + _attention(config, weights, layer, _norm(weights[f"{layer}.input_layernorm.weight"], x, eps))
        normed = _norm(weights[f"{layer}.post_attention_layernorm.weight"], x, eps)
        if config["model_type"] == "qwen3_moe":
            update, ids = _experts(config, weights, layer, normed)
            routed.append(ids)
        else:
            update = _swiglu(weights, f"{layer}.mlp", normed)
        x = x + update
    logits = _norm(weights["model.norm.weight"], x, config["rms_norm_eps"]) @ _real(weights["lm_head.weight"]).T
    return logits, torch.stack(routed, 1) if routed else None


def compare_samples(
    config: Mapping[str, Any], weights: Mapping[str, torch.Tensor], samples: Sequence[Mapping[str, Any]], temperature: float
) -> tuple[torch.Tensor, int, int]:
    """An engine's samples against :func:`forward` on the same weights.

    Returns recorded less expected log-probs of all response tokens, and of how many of how many routings the experts are equal.
    """
    differences, routed, total = [], 0, 0
    for sample in samples:
        prompt, response = list(sample["prompt"]), list(sample["response_token_ids"])
        logits, experts = forward(config, weights, (prompt + response)[:-1])
        expected = (logits / temperature).log_softmax(-1)[len(prompt) - 1 :].gather(1, torch.tensor(response)[:, None])[:, 0]
        differences.append(torch.tensor(sample["rollout_log_probs"]) - expected)
        assert (experts is None) == (sample["routed_experts"] is None)
        if experts is not None:
            recorded = torch.from_numpy(sample["routed_experts"].astype("int64"))
            assert recorded.shape == experts.shape
            routed += int((recorded.sort(-1).values == experts.sort(-1).values).all(-1).sum())
            total += experts.shape[0] * experts.shape[1]
    return torch.cat(differences), routed, total
