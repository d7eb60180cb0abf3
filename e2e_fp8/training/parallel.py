"""Processes and ranks of the trainer: torch.distributed, Megatron's groups, and names that hold across ranks."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from e2e_fp8.errors import ConfigError
from e2e_fp8.layout import ShardedParameter
from e2e_fp8.megatron_names import whole_model_name
from e2e_fp8.rank_grid import RankGrid
from e2e_fp8.training.ground import Ground

_TIMEOUT = timedelta(minutes=30)
_LAUNCHER = ("RANK", "MASTER_ADDR", "MASTER_PORT")


def world_size() -> int:
    """Ranks of the job: torch.distributed's if it runs already, else the launcher's WORLD_SIZE, else 1.

    Raises:
        ConfigError: the launcher's variables are incomplete.
    """
    if dist.is_initialized():
        return dist.get_world_size()
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"WORLD_SIZE is {text!r}, but must be a positive number: start the ranks with torchrun.")
    missing = [name for name in _LAUNCHER if name not in os.environ] if int(text) > 1 else []
    if missing:
        raise ConfigError(f"WORLD_SIZE is {text}, but {', '.join(missing)} is not set: start the ranks with torchrun.")
    return int(text)


def initialize_parallel_state(grid: RankGrid, ground: Ground) -> None:
    """torch.distributed (unless the process has it already) and Megatron's groups.

    Raises:
        ConfigError: the process already has Megatron groups of other sizes.
    """
    from megatron.core import parallel_state

    if not dist.is_initialized():
        start_torch_distributed(grid, ground)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=grid.tensor,
            context_parallel_size=grid.context,
            pipeline_model_parallel_size=grid.pipeline,
            virtual_pipeline_model_parallel_size=grid.virtual_pipeline if grid.virtual_pipeline > 1 else None,
            expert_model_parallel_size=grid.expert,
            expert_tensor_parallel_size=grid.expert_tensor,
        )
    _check_groups(grid)


def start_torch_distributed(grid: RankGrid, ground: Ground) -> None:
    """The process group of the whole job, over the launcher's rendezvous when it has several ranks. Collective."""
    if grid.world == 1:
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(ground.process_group_backend, store=store, rank=0, world_size=1)
    else:
        dist.init_process_group(ground.process_group_backend, timeout=_TIMEOUT)


def _check_groups(grid: RankGrid) -> None:
    """The arithmetic of RankGrid and Megatron's groups must agree, or weights would land on other ranks than planned."""
    from megatron.core import parallel_state as state

    place = grid.place(dist.get_rank())
    found = {
        "tensor": (state.get_tensor_model_parallel_rank(), state.get_tensor_model_parallel_world_size()),
        "context": (state.get_context_parallel_rank(), state.get_context_parallel_world_size()),
        "pipeline": (state.get_pipeline_model_parallel_rank(), state.get_pipeline_model_parallel_world_size()),
        "data": (state.get_data_parallel_rank(), state.get_data_parallel_world_size()),
        "expert": (state.get_expert_model_parallel_rank(), state.get_expert_model_parallel_world_size()),
        "expert_tensor": (state.get_expert_tensor_parallel_rank(), state.get_expert_tensor_parallel_world_size()),
    }
    for name, (rank, size) in found.items():
        if (rank, size) != (getattr(place, name), getattr(grid, name)):
            raise ConfigError(
                f"Megatron places this rank at {rank} of {size} in {name} parallelism, but the configuration at {getattr(place, name)} of "
                f"{getattr(grid, name)}: a process can hold one set of parallel sizes only, so start a new one."
            )


def local_device_index() -> int:
    """Index of this process's GPU on its host: the launcher's LOCAL_RANK, else the current device."""
    return int(os.environ["LOCAL_RANK"]) if "LOCAL_RANK" in os.environ else torch.cuda.current_device()


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter of this rank, with its place in the whole model."""

    name: str
    """Megatron's name with the layer and expert numbers of the whole model."""
    weight: torch.nn.Parameter
    module: torch.nn.Module
    """The module that owns it."""
    layout: ShardedParameter

    @property
    def in_linear(self) -> bool:
        """Whether it is the weight of a linear inside a layer, which a plan may put in FP8 (not router, embedding or head)."""
        return self.layout.kind == "linear"


def rank_parameters(chunks: Sequence[Any], layout: Sequence[ShardedParameter]) -> list[Parameter]:
    """Every parameter of this rank's model chunks, each once, matched with the layout.

    Raises:
        RuntimeError: Megatron built another parameter, shape or layer than the layout says.
    """
    found = []
    left = {(entry.chunk, entry.name): entry for entry in layout}
    for index, chunk in enumerate(chunks):
        for name, weight in chunk.named_parameters():
            entry = left.pop((index, name), None)
            if entry is None or tuple(weight.shape) != entry.shape or not _same_layer(chunk, entry):
                raise RuntimeError(f"Megatron built {name} {tuple(weight.shape)} in chunk {index}, but the layout has {entry}.")
            module = chunk.get_submodule(name.rpartition(".")[0])
            full = whole_model_name(name, entry.layer, entry.expert)
            found.append(Parameter(name=full, weight=weight, module=module, layout=entry))
    if left:
        raise RuntimeError(f"Megatron built no parameter for {sorted(left)[:4]} ({len(left)} in all) of the layout.")
    return found


def _same_layer(chunk: Any, entry: ShardedParameter) -> bool:
    if entry.layer is None:
        return True
    return chunk.decoder.layers[int(entry.name.split(".")[2])].layer_number == entry.layer + 1


def data_group(parameter: torch.Tensor) -> Any:
    """Process group over which the optimizer divides the master of ``parameter``."""
    from megatron.core import parallel_state

    if getattr(parameter, "allreduce", True):
        return parallel_state.get_data_parallel_group(with_context_parallel=True)
    return parallel_state.get_expert_data_parallel_group()


def tensor_group() -> Any:
    """Process group that divides rows and columns, and the vocabulary."""
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_group()


def context_group() -> Any:
    """Process group that divides the tokens of one micro-batch."""
    from megatron.core import parallel_state

    return parallel_state.get_context_parallel_group()
