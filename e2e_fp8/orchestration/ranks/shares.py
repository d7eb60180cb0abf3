"""Checkpoints of trainers of several ranks: who may resume them, and whole weights out of all shares."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from e2e_fp8.config.hf import to_hf_config
from e2e_fp8.config.root import Config
from e2e_fp8.config.training import ParallelConfig
from e2e_fp8.errors import CheckpointError, ConfigError
from e2e_fp8.layout import ShardedParameter, hf_tensors, megatron_shards
from e2e_fp8.megatron_names import QKV_ORDER, whole_model_name
from e2e_fp8.orchestration.checkpoint import CheckpointStore
from e2e_fp8.rank_grid import RankGrid


def grid_of(state: Mapping[str, Any]) -> RankGrid:
    """Ranks that wrote the checkpoint that rank 0's ``state`` is part of."""
    return RankGrid(**state["ranks"]) if "ranks" in state else RankGrid()


def on_one_rank(cfg: Config) -> Config:
    """``cfg`` for a process that reads a run's weights: the parallel sizes of the trainer that wrote them are not its own."""
    training = cfg.training.model_copy(update={"parallel": ParallelConfig()})
    return cfg.model_copy(update={"training": training})


def check_same_ranks(state: Mapping[str, Any], grid: RankGrid) -> None:
    """Raises ConfigError when other ranks wrote the checkpoint: each rank continues from its own share."""
    wrote = grid_of(state)
    if wrote != grid:
        raise ConfigError(
            f"The checkpoint was written by {_words(wrote)}, but this job has {_words(grid)}: each rank continues from its own share, so "
            f"start {wrote.world} with the same sizes to resume (e2e-fp8 eval and export read it in one process)."
        )


def _words(grid: RankGrid) -> str:
    sizes = [f"{name} {size}" for name, size in asdict(grid).items() if name != "world" and size > 1]
    count = "1 rank" if grid.world == 1 else f"{grid.world} ranks"
    return f"{count} ({', '.join(sizes)})" if sizes else count


def whole_masters(store: CheckpointStore, step: int, state: Mapping[str, Any], cfg: Config) -> dict[str, torch.Tensor]:
    """FP32 masters of all ranks by Hugging Face name, in the shapes of the whole model, on the CPU.

    Raises:
        CheckpointError: a share is damaged, or the shares together are not exactly the model.
    """
    grid = grid_of(state)
    shares = [state["trainer"], *(store.load(step, rank=rank)["policy"] for rank in range(1, grid.world))]
    hf_config = to_hf_config(cfg.model, None)
    layouts = [megatron_shards(hf_config, grid.layout, rank, qkv_order=QKV_ORDER, spec="local") for rank in range(grid.world)]
    whole = {tensor.name: torch.empty(tensor.shape) for tensor in hf_tensors(hf_config, lambda _: False)}
    written = dict.fromkeys(whole, 0)
    for entry, master, known in _joined(shares, layouts):
        for part in entry.parts:
            rows = slice(part.row, part.row + part.rows[1] - part.rows[0])
            whole[part.hf_name][part.index] = master[rows]
            written[part.hf_name] += int(known[rows].sum())
    short = [name for name, count in written.items() if count != whole[name].numel()]
    if short:
        raise CheckpointError(f"The shares of the checkpoint of step {step} do not make up {', '.join(short[:3])} ({len(short)} tensors).")
    return whole


_Part = tuple[ShardedParameter, torch.Tensor, torch.Tensor]
"""A parameter, its master, and which elements of it are known."""


def _joined(shares: Sequence[Mapping[str, Any]], layouts: Sequence[Sequence[ShardedParameter]]) -> list[_Part]:
    """Every distinct part of the model, put together from the ranges that data parallelism made of its master."""
    found: dict[tuple[Any, ...], _Part] = {}
    for share, layout in zip(shares, layouts, strict=True):
        for entry in layout:
            name = whole_model_name(entry.name, entry.layer, entry.expert)
            key = (name, tuple((part.hf_name, part.rows, part.cols) for part in entry.parts))
            _, master, known = found.setdefault(key, (entry, torch.empty(entry.shape), torch.zeros(entry.shape, dtype=torch.bool)))
            if name in share["spans"]:
                start, stop = share["spans"][name]
                master.view(-1)[start:stop] = share["parameters"][name]["master"].view(-1)
                known.view(-1)[start:stop] = True
    return list(found.values())
