"""Hugging Face weights in: names, shares of one rank, fresh initial weights, safetensors directories."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from e2e_fp8.config.model import ModelConfig
from e2e_fp8.errors import CheckpointError
from e2e_fp8.layout import ShardedParameter
from e2e_fp8.megatron_names import hf_sources


def hf_modules_of(megatron_linear: str) -> list[str]:
    """HF module names of one Megatron linear weight name (``...linear_qkv.weight`` -> q, k and v)."""
    return [name.removesuffix(".weight") for name in hf_sources(megatron_linear)]


def hf_shapes(cfg: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every parameter of the HF model, in a fixed order."""
    hidden, width = cfg.hidden_size, cfg.head_dim
    queries, keys = cfg.num_attention_heads * width, cfg.num_key_value_heads * width
    yield "model.embed_tokens.weight", (cfg.vocab_size, hidden)
    for index in range(cfg.num_hidden_layers):
        prefix = f"model.layers.{index}."
        yield prefix + "input_layernorm.weight", (hidden,)
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            yield f"{prefix}self_attn.{name}_proj.weight", (rows, hidden)
        yield prefix + "self_attn.o_proj.weight", (hidden, queries)
        yield prefix + "self_attn.q_norm.weight", (width,)
        yield prefix + "self_attn.k_norm.weight", (width,)
        yield prefix + "post_attention_layernorm.weight", (hidden,)
        if cfg.is_moe:
            yield prefix + "mlp.gate.weight", (cfg.num_experts, hidden)
        blocks = [f"mlp.experts.{e}." for e in range(cfg.num_experts)] if cfg.is_moe else ["mlp."]
        ffn = cfg.moe_intermediate_size if cfg.is_moe else cfg.intermediate_size
        for block in blocks:
            yield f"{prefix}{block}gate_proj.weight", (ffn, hidden)
            yield f"{prefix}{block}up_proj.weight", (ffn, hidden)
            yield f"{prefix}{block}down_proj.weight", (hidden, ffn)
    yield "model.norm.weight", (hidden,)
    if not cfg.tie_word_embeddings:
        yield "lm_head.weight", (cfg.vocab_size, hidden)


def initial_hf_weights(cfg: ModelConfig, seed: int) -> dict[str, torch.Tensor]:
    """Fresh FP32 weights under HF names: normal(0, initializer_range), norms one; the same on every ground for one seed."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in hf_shapes(cfg):
        if len(shape) == 1:
            weights[name] = torch.ones(shape)
        else:
            weights[name] = torch.empty(shape).normal_(0.0, cfg.initializer_range, generator=generator)
    return weights


def check_weights(tensors: Mapping[str, torch.Tensor], cfg: ModelConfig) -> None:
    """Refuse a set of HF-named weights that is not exactly the model's.

    Raises:
        CheckpointError: a tensor is missing, has another shape than the configuration says, or is not used by the model.
    """
    expected = dict(hf_shapes(cfg))
    given = {n: t for n, t in tensors.items() if not (cfg.tie_word_embeddings and n == "lm_head.weight")}
    missing, extra = sorted(expected.keys() - given.keys()), sorted(given.keys() - expected.keys())
    if missing or extra:
        raise CheckpointError(
            f"The weights do not fit a {cfg.architecture} model of {cfg.num_hidden_layers} layers: "
            f"missing {missing[:4]} ({len(missing)} in all), unknown {extra[:4]} ({len(extra)} in all). Check the model section."
        )
    for name, shape in expected.items():
        if tuple(given[name].shape) != shape:
            raise CheckpointError(f"Tensor {name} has shape {tuple(given[name].shape)}, but the model section asks for {shape}.")
        if given[name].dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise CheckpointError(f"Tensor {name} has dtype {given[name].dtype}; weights are read as float32, bfloat16 or float16.")


def local_weight(layout: ShardedParameter, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """FP32 share of one rank of one trainer parameter, cut from checked HF weights."""
    return torch.cat([tensors[part.hf_name][part.index].float() for part in layout.parts])


def import_safetensors(path: str | Path) -> dict[str, torch.Tensor]:
    """All tensors of a Hugging Face directory: ``model.safetensors``, or the shards of ``model.safetensors.index.json``.

    Raises:
        CheckpointError: no weights there, a missing or truncated shard, or a tensor absent from the shard the index names.
    """
    root = Path(path)
    index_file, single = root / "model.safetensors.index.json", root / "model.safetensors"
    if index_file.exists():
        try:
            shard_of: dict[str, str] = json.loads(index_file.read_text())["weight_map"]
        except (ValueError, KeyError) as error:
            raise CheckpointError(f"{index_file} is not a safetensors index ({error}). Fetch it again.") from error
    elif single.exists():
        shard_of = {}
    else:
        raise CheckpointError(f"{root} holds neither model.safetensors nor model.safetensors.index.json.")
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(set(shard_of.values())) or [single.name]:
        wanted = [name for name, file in shard_of.items() if file == shard]
        tensors.update(_read_shard(root / shard, wanted))
    return tensors


def _read_shard(file: Path, wanted: list[str]) -> dict[str, torch.Tensor]:
    """The ``wanted`` tensors of one safetensors file, or all of them if the list is empty."""
    listed = f" It should hold {wanted[:3]} ({len(wanted)} tensors)." if wanted else ""
    if not file.exists():
        raise CheckpointError(f"Weight file {file} is missing.{listed} Fetch the checkpoint again.")
    try:
        with safe_open(file, framework="pt") as reader:
            present = set(reader.keys())
            absent = [name for name in wanted if name not in present]
            if absent:
                raise CheckpointError(f"Weight file {file} lacks {absent[:3]} ({len(absent)} tensors) that the index places there.")
            return {name: reader.get_tensor(name) for name in (wanted or sorted(present))}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"Weight file {file} is truncated or damaged ({error}).{listed} Fetch it again.") from error
