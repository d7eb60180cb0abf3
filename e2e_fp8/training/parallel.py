"""Processes and ranks of the trainer: torch.distributed, Megatron's groups, and names that hold across ranks."""

import os
import re
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from e2e_fp8.config.root import Config
from e2e_fp8.errors import ConfigError
from e2e_fp8.rank_grid import RankGrid
from e2e_fp8.training.ground import Ground, LinearWeight

_TIMEOUT = timedelta(minutes=30)
_LAUNCHER = ("RANK", "MASTER_ADDR", "MASTER_PORT")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"(\.experts\.local_experts\.|\.experts\.linear_fc[12]\.weight)(\d+)")


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
        _start_torch_distributed(grid, ground)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=grid.tensor,
            pipeline_model_parallel_size=grid.pipeline,
            virtual_pipeline_model_parallel_size=grid.virtual_pipeline if grid.virtual_pipeline > 1 else None,
            expert_model_parallel_size=grid.expert,
            expert_tensor_parallel_size=grid.expert_tensor,
        )
    _check_groups(grid)


def _start_torch_distributed(grid: RankGrid, ground: Ground) -> None:
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


def global_name(local_name: str, chunk: Any, grid: RankGrid) -> str:
    """Parameter name of one model chunk with the layer and expert numbers of the whole model.

    Megatron numbers the layers of a chunk and the experts of a rank from 0.
    """
    layer = _LAYER.match(local_name)
    if layer is None:
        return local_name
    number = chunk.decoder.layers[int(layer[1])].layer_number - 1
    name = f"decoder.layers.{number}.{local_name[layer.end() :]}"
    if grid.expert == 1:
        return name
    first = grid.place(dist.get_rank()).expert * chunk.config.num_moe_experts // grid.expert
    return _EXPERT.sub(lambda found: f"{found[1]}{int(found[2]) + first}", name)


def named_parameters(chunks: Sequence[Any], grid: RankGrid) -> list[tuple[str, torch.nn.Parameter]]:
    """``(global name, parameter)`` of every parameter of this rank, each once."""
    return [(global_name(name, chunk, grid), parameter) for chunk in chunks for name, parameter in chunk.named_parameters()]


def linear_weights(chunks: Sequence[Any], grid: RankGrid) -> list[LinearWeight]:
    """The weights of all linears inside layers that a plan may put in FP8 (not router, embedding or head)."""
    found = []
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if ".linear_" in name and not name.endswith(("layer_norm_weight", "bias")):
                module = chunk.get_submodule(name.rpartition(".")[0])
                found.append(LinearWeight(name=global_name(name, chunk, grid), parameter=parameter, module=module))
    return found


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
