"""Jobs of several trainer ranks for the tests, and what the slow references say their bytes should be."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from gpus import places
from references import blockwise_reference, fused_reference, sharding_reference
from safetensors.torch import load_file

SCRIPT = Path(__file__).with_name("rank_process.py")
MODEL = {
    "architecture": "qwen3_moe",
    "vocab_size": 64,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_experts": 4,
    "initializer_range": 0.05,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One launch."""

    world: int
    parallel: dict = field(default_factory=dict)
    model: dict = field(default_factory=dict)
    precision: str = "fp8"
    alignment: str = "fast"
    steps: int = 2
    backend: str = "cpu"
    rollout_tp: int = 1
    transport: str = "ipc"
    objective: dict = field(default_factory=dict)
    more: dict = field(default_factory=dict)
    """What else the ranks do, see rank_process.py: ``publish``, ``engines``, ``replay``."""

    @property
    def config(self) -> dict:
        """With an epsilon of 1, Adam's update is proportional to the gradient, so that a wrong factor shows and a flipped sign of
        a tiny gradient does not."""
        served = {"rollout": {"placement": "server", "tensor_parallel": self.rollout_tp}, "sync": {"transport": self.transport}}
        return (served if self.rollout_tp > 1 else {}) | {
            "model": {**MODEL, **self.model},
            "numerics": {"training_precision": self.precision, "rollout_precision": self.precision, "alignment": self.alignment},
            "run": {"backend": self.backend},
            "objective": self.objective,
            "training": {"weight_decay": 0.1, "parallel": self.parallel, "clip_grad": 100.0, "adam_eps": 1.0}
            | ({"router_replay": {"mode": self.more["replay"]}} if "replay" in self.more else {}),
        }

    def alone(self) -> "Case":
        """The same on one rank."""
        more = {
            name: self.more[name]
            for name in (
                "replay",
                "microbatches",
            )
            if name in self.more
        }
        same = {name: getattr(self, name) for name in ("model", "precision", "alignment", "steps", "backend")}
        return Case(world=1, more=more, **same)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def write_case(case: Case, out: Path) -> None:
    out.mkdir(parents=True)
    text = {"config": case.config, "seed": 7, "microbatches": [[9, 30, 5], [17, 12]], "learning_rate": 0.1, "steps": case.steps}
    text |= case.more
    (out / "case.json").write_text(json.dumps(text))


def rank_environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"}


def start_apart(case: Case, out: Path, *, engines: int = 0) -> None:
    """Every trainer and engine rank of ``case`` in a process that was not forked, as CUDA needs it, where :func:`places` puts it."""
    ports = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(case.world)}
    ranks = []
    for rank, place in enumerate(places(case.world + engines)):
        environment = rank_environment() | ports | {"RANK": str(rank), "LOCAL_RANK": str(place.gpu)} | place.environ
        ranks.append(subprocess.Popen([sys.executable, str(SCRIPT), str(out)], stderr=subprocess.PIPE, text=True, env=environment))
    try:
        told = [rank.communicate(timeout=300)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    failed = [f.read_text() for pattern in ("failed-*", "refused-*") for f in out.glob(pattern)]
    assert [rank.returncode for rank in ranks] == [0] * len(ranks), "\n".join(failed or told)


def held(folder: Path, world: int, when: str) -> list[dict[str, torch.Tensor]]:
    return [load_file(folder / f"{when}-{rank}.safetensors") for rank in range(world)]


def bits(tensor: torch.Tensor) -> np.ndarray:
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
    return tensor.contiguous().view(kind).numpy()


def masters(found: list[dict[str, torch.Tensor]]) -> list[dict[str, np.ndarray]]:
    return [{n.removeprefix("master/"): bits(t) for n, t in rank.items() if n.startswith("master/")} for rank in found]


def model_of(case: Case) -> dict:
    return case.config["model"]


def quantized(whole: dict[str, np.ndarray], case: Case):
    """(codes, scale bits, BF16 bits) of whole FP32 masters given as bits."""
    codes, scales, high = {}, {}, {}
    for name, master in whole.items():
        rounded = torch.from_numpy(master).view(torch.float32).bfloat16()
        if case.precision == "fp8" and name.endswith("_proj.weight"):
            found = blockwise_reference.quantize(
                rounded.float().numpy(), "e4m3", "128x128", False, 0.0, float(torch.finfo(torch.bfloat16).max)
            )
            codes[name], scales[name] = found[0], found[1].view(np.int32)
        else:
            high[name] = bits(rounded)
    return codes, scales, high


def whole_weights(case: Case, folder: Path) -> dict[str, torch.Tensor]:
    """Every Hugging Face tensor of the trained model: all ranks' masters gathered and quantized by the slow references."""
    codes, scales, high = quantized(
        sharding_reference.gather(masters(held(folder, case.world, "end")), model_of(case), case.parallel), case
    )
    found = {name: torch.from_numpy(values).view(torch.float8_e4m3fn) for name, values in codes.items()}
    found |= {f"{name}_scale_inv": torch.from_numpy(values).view(torch.float32) for name, values in scales.items()}
    return found | {name: torch.from_numpy(values).view(torch.bfloat16).squeeze(-1) for name, values in high.items()}


def engine_reference(
    case: Case, weights: dict[str, torch.Tensor], rank: int, size: int, *, expert: bool = False
) -> dict[str, torch.Tensor]:
    """Every parameter of one engine rank by vLLM's names; FP8 codes as uint8."""
    found = fused_reference.fused_fp8(model_of(case) | {"model_type": model_of(case)["architecture"]}, weights, rank, size, expert=expert)
    for name, tensor in weights.items():
        if tensor.dtype == torch.bfloat16:
            found[name] = tensor.chunk(size)[rank] if name in ("model.embed_tokens.weight", "lm_head.weight") else tensor
    return found


def native_reference(case: Case, folder: Path, rank: int, size: int) -> dict[str, torch.Tensor]:
    """As :func:`engine_reference`, every FP8 parameter quantized as the fused matrix that the engine rank holds."""
    whole = sharding_reference.gather(masters(held(folder, case.world, "end")), model_of(case), case.parallel)
    rounded = {name: torch.from_numpy(values).view(torch.float32).bfloat16() for name, values in whole.items()}
    config = model_of(case) | {"model_type": model_of(case)["architecture"]}
    found = {}
    for name, fused in fused_reference.fused_fp8(config, rounded, rank, size, kinds=["weight"]).items():
        matrices = fused.float().reshape(-1, *fused.shape[-2:])
        parts = [
            blockwise_reference.quantize(one.numpy(), "e4m3", "128x128", False, 0.0, float(torch.finfo(torch.bfloat16).max))[:2]
            for one in matrices
        ]
        codes, scales = (torch.from_numpy(np.stack(each)) for each in zip(*parts, strict=True))
        found[name] = codes.reshape(fused.shape)
        found[f"{name}_scale_inv"] = scales.reshape(*fused.shape[:-2], *scales.shape[1:])
    return found
