"""Build vLLM's real model classes, without an engine, load a checkpoint with their own loaders, and write down every parameter.

Usage: ``python engine_parameters_process.py RANK WORLD_SIZE PORT CASES.json OUT.json``. Each case has an HF config, parallel
sizes (tensor x data = world size) and a checkpoint; OUT.json gets the name of a file with the parameters of each. Groups are real
gloo groups between WORLD_SIZE processes.
"""

import gc
import json
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from vllm_models import SWITCHES, allow_latent_attention, building, vllm_config


def load(model: torch.nn.Module, checkpoint: str) -> dict[str, torch.Tensor]:
    """Every parameter as vLLM's loader leaves it; what the loader does not touch has all bits set."""
    found = dict(model.named_parameters())
    for parameter in found.values():
        parameter.data.reshape(-1).view(torch.uint8).fill_(255)
    model.load_weights(load_file(checkpoint).items())  # pyright: ignore[reportCallIssue]
    return {name: parameter.detach().clone().contiguous() for name, parameter in found.items()}


def parameters(case: dict, rank: int, world_size: int, port: int) -> dict[str, torch.Tensor]:
    """The parameters of the model that vLLM builds on this rank, with the weights of the case's checkpoint."""
    from vllm.model_executor.model_loader.utils import initialize_model

    config = vllm_config(case["config"], tensor_parallel_size=case["tensor"], enable_expert_parallel=case["expert"])
    config.parallel_config.data_parallel_size = case["data"]
    config.parallel_config.data_parallel_rank = rank // case["tensor"]
    with building(config, world_size, rank, f"tcp://127.0.0.1:{port}", tensor=case["tensor"]):
        return load(initialize_model(config), case["checkpoint"])


def main(rank: int, world_size: int, port: int, cases: Path, out: Path) -> None:
    # the executor, which is left out here, names the shared memory of one engine's ranks
    os.environ.update(SWITCHES, VLLM_DIST_IDENT=f"names-{port}")
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    allow_latent_attention()
    found = {}
    for index, (name, case) in enumerate(json.loads(cases.read_text()).items()):
        found[name] = str(out.with_suffix(f".{index}.safetensors"))
        save_file(parameters(case, rank, world_size, port), found[name])
        gc.collect()
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), Path(sys.argv[5]))
