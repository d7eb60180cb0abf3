"""Which HF tensors a model consists of, and where vLLM keeps each of them.

vLLM stacks ``q_proj``, ``k_proj`` and ``v_proj`` by rows into ``qkv_proj``, ``gate_proj`` and ``up_proj`` into
``gate_up_proj``, and the experts into ``w13_weight`` ``[E, 2I, H]`` and ``w2_weight`` ``[E, H, I]``; block scales are
stacked alike, one row of scales for 128 rows of weights. The layout is an explicit list, so that names, shapes and
dtypes can be checked before a byte is written, and live bytes can be read back under their HF names.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from e2e_fp8.errors import EngineError
from e2e_fp8.numerics.formats import TILE


@dataclass(frozen=True, kw_only=True)
class TensorSlot:
    """One HF tensor and its place in vLLM's parameters."""

    name: str
    """HF name, e.g. ``model.layers.0.mlp.experts.3.up_proj.weight_scale_inv``."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    parameter: str
    """vLLM parameter that holds it, e.g. ``model.layers.0.mlp.experts.routed_experts.w13_weight_scale_inv``."""
    expert: int | None = None
    """Index into the leading axis of the parameter, for experts."""
    row: int = 0
    """First row within the parameter (of the expert)."""
    fp8: bool = False
    """Part of an FP8 linear layer: a weight in E4M3 or its block scales."""

    def view(self, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The tensor as a view of ``parameters``, vLLM's live ones.

        Raises EngineError when vLLM holds it under another name, shape or dtype.
        """
        if self.parameter not in parameters:
            raise EngineError(f"vLLM has no parameter {self.parameter}, where {self.name} was expected; the vLLM version is not supported.")
        whole = parameters[self.parameter].detach()
        part = whole if self.expert is None else whole[self.expert]
        part = part[self.row : self.row + self.shape[0]]
        if tuple(part.shape) != self.shape or part.dtype != self.dtype:
            raise EngineError(
                f"vLLM holds {self.name} as {part.dtype} {tuple(part.shape)} (in {self.parameter}), expected {self.dtype} {self.shape}: "
                "it repacked the weights, so their bytes cannot be compared."
            )
        return part


@dataclass(frozen=True)
class _Linear:
    """One HF linear module: ``parameter`` is the vLLM prefix its tensors are appended to."""

    module: str
    rows: int
    columns: int
    parameter: str
    separator: str = "."
    expert: int | None = None
    row: int = 0


def read_hf_config(model_dir: Path) -> dict[str, Any]:
    """config.json of ``model_dir``. Raises EngineError when it is missing or of an unsupported architecture."""
    path = model_dir / "config.json"
    if not path.is_file():
        raise EngineError(f"Rollout model directory {model_dir} has no config.json.")
    config = json.loads(path.read_text())
    check_model_type(config, str(path))
    return config


def check_model_type(config: Mapping[str, Any], where: str) -> None:
    """Raise EngineError, naming ``where`` it came from, for an architecture whose layout is not known."""
    if config.get("model_type") not in ("qwen3", "qwen3_moe"):
        raise EngineError(f"{where}: model_type {config.get('model_type')!r} is not supported; use qwen3 or qwen3_moe.")


def _ceil_tiles(size: int) -> int:
    return -(-size // TILE)


def _attention(config: Mapping[str, Any], layer: str) -> list[_Linear]:
    hidden, width = config["hidden_size"], config["head_dim"]
    query, kv = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    qkv = f"{layer}.self_attn.qkv_proj"
    return [
        _Linear(f"{layer}.self_attn.q_proj", query, hidden, qkv),
        _Linear(f"{layer}.self_attn.k_proj", kv, hidden, qkv, row=query),
        _Linear(f"{layer}.self_attn.v_proj", kv, hidden, qkv, row=query + kv),
        _Linear(f"{layer}.self_attn.o_proj", hidden, query, f"{layer}.self_attn.o_proj"),
    ]


def _feed_forward(config: Mapping[str, Any], layer: str) -> list[_Linear]:
    hidden = config["hidden_size"]
    if config["model_type"] == "qwen3":
        width, fused = config["intermediate_size"], f"{layer}.mlp.gate_up_proj"
        return [
            _Linear(f"{layer}.mlp.gate_proj", width, hidden, fused),
            _Linear(f"{layer}.mlp.up_proj", width, hidden, fused, row=width),
            _Linear(f"{layer}.mlp.down_proj", hidden, width, f"{layer}.mlp.down_proj"),
        ]
    width, experts = config["moe_intermediate_size"], f"{layer}.mlp.experts.routed_experts"
    linears = [_Linear(f"{layer}.mlp.gate", config["num_experts"], hidden, f"{layer}.mlp.gate")]
    for e in range(config["num_experts"]):
        hf = f"{layer}.mlp.experts.{e}"
        linears += [
            _Linear(f"{hf}.gate_proj", width, hidden, f"{experts}.w13", "_", e),
            _Linear(f"{hf}.up_proj", width, hidden, f"{experts}.w13", "_", e, width),
            _Linear(f"{hf}.down_proj", hidden, width, f"{experts}.w2", "_", e),
        ]
    return linears


def _linear_slots(linear: _Linear, fp8: bool) -> Iterator[TensorSlot]:
    prefix = f"{linear.parameter}{linear.separator}"
    yield TensorSlot(
        name=f"{linear.module}.weight",
        shape=(linear.rows, linear.columns),
        dtype=torch.float8_e4m3fn if fp8 else torch.bfloat16,
        parameter=f"{prefix}weight",
        expert=linear.expert,
        row=linear.row,
        fp8=fp8,
    )
    if fp8:
        yield TensorSlot(
            name=f"{linear.module}.weight_scale_inv",
            shape=(_ceil_tiles(linear.rows), _ceil_tiles(linear.columns)),
            dtype=torch.float32,
            parameter=f"{prefix}weight_scale_inv",
            expert=linear.expert,
            row=_ceil_tiles(linear.row),
            fp8=True,
        )


def _plain(name: str, *shape: int) -> TensorSlot:
    return TensorSlot(name=name, shape=shape, dtype=torch.bfloat16, parameter=name)


def engine_layout(config: Mapping[str, Any]) -> list[TensorSlot]:
    """Every tensor of a model with this config.json, in the order of its layers.

    A linear layer is FP8 when ``quantization_config`` is present and does not list it in ``modules_to_not_convert``.
    """
    quantization = config.get("quantization_config")
    skipped = set(quantization.get("modules_to_not_convert") or ()) if quantization else set()
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    slots = [_plain("model.embed_tokens.weight", vocab, hidden)]
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        slots += [_plain(f"{layer}.{norm}.weight", hidden) for norm in ("input_layernorm", "post_attention_layernorm")]
        slots += [_plain(f"{layer}.self_attn.{norm}.weight", config["head_dim"]) for norm in ("q_norm", "k_norm")]
        for linear in _attention(config, layer) + _feed_forward(config, layer):
            slots += _linear_slots(linear, fp8=quantization is not None and linear.module not in skipped)
    slots.append(_plain("model.norm.weight", hidden))
    if not config.get("tie_word_embeddings", False):
        slots.append(_plain("lm_head.weight", vocab, hidden))
    return slots


def check_delivery(layout: list[TensorSlot], delivered: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
    """Raise EngineError unless ``delivered`` (HF name -> dtype, shape) is exactly the set ``layout`` describes."""
    expected = {slot.name: slot for slot in layout}
    missing = [name for name in expected if name not in delivered]
    unknown = [name for name in delivered if name not in expected]
    if missing or unknown:
        raise EngineError(
            f"Weight update refused, nothing was written: {len(missing)} tensors missing {missing[:4]}, "
            f"{len(unknown)} unexpected {unknown[:4]} (of {len(expected)} expected)."
        )
    for name, (dtype, shape) in delivered.items():
        slot = expected[name]
        if dtype != slot.dtype or shape != slot.shape:
            raise EngineError(
                f"Weight update refused, nothing was written: {name} is {dtype} {shape}, the engine needs {slot.dtype} {slot.shape}."
            )
