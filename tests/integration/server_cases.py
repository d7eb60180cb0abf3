"""Real vLLM servers for the tests: model folders, random weights, and an extension that shows live bytes."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from integration.tiny_runs import python_path
from integration.trainer_cases import case_config, exported, hf_config, own_shares, random_weights, shares_publisher
from references.fused_reference import fused_fp8

from e2e_fp8.config.root import Config
from e2e_fp8.export.policy_folder import checkpoint_writer
from e2e_fp8.rollout.engine_args import engine_args
from e2e_fp8.rollout.environment import rollout_environment
from e2e_fp8.rollout.server_process import EXTENSION, ServerProcess, server_flags
from e2e_fp8.rollout.worker_extension import WorkerExtension
from e2e_fp8.sync.http_client import ServerClient
from e2e_fp8.sync.publish_report import PublishReport
from e2e_fp8.sync.publisher import WeightPublisher

__all__ = ["Served", "assert_live", "case_config", "exported", "generate", "own_shares", "random_weights", "shares_publisher"]
HERE = Path(__file__).resolve().parent


class ShowingExtension(WorkerExtension):
    """The real extension, which also writes the worker's raw parameters to a folder."""

    def show_parameters(self, folder: str) -> dict[str, Any]:
        transfer = self.weight_transfer_engine
        rank = self.vllm_config.parallel_config.rank
        shown = {n: p.detach().cpu().clone().contiguous() for n, p in transfer.model.named_parameters() if p.numel()}
        save_file(shown, Path(folder) / f"rank{rank}.safetensors")
        return {}


def write_model(cfg: Config, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config(cfg)))
    return folder


def start_server(
    cfg: Config,
    model: Path,
    folder: Path,
    *,
    environ: Mapping[str, str] = MappingProxyType({}),
    first_port: int | None = None,
    **changes: Any,
) -> ServerProcess:
    """A server of ``model`` with :class:`ShowingExtension`.

    ``environ`` is added to its environment, ``first_port`` is the port that is tried first; ``changes`` replace keyword arguments of
    ``vllm.LLM``.
    """
    device = cfg.run.backend
    args = engine_args(cfg, model, device=device, is_moe=cfg.model.is_moe, fp8=True) | changes
    flags = ["integration.server_cases.ShowingExtension" if flag == EXTENSION else flag for flag in server_flags(args)]
    whole = os.environ | rollout_environment(cfg, device=device) | {"PYTHONPATH": python_path(HERE.parent)} | dict(environ)
    return ServerProcess(flags, whole, folder, timeout_s=800, first_port=first_port)


def generate(client, prompt: tuple[int, ...] = (2, 3, 7, 5), seed: int = 3) -> list[int]:
    """Token ids of one completion, as a plain HTTP client gets them."""
    params = {"temperature": 0.7, "max_tokens": 8, "seed": seed, "detokenize": False}
    answer = client.post("/inference/v1/generate", {"token_ids": list(prompt), "sampling_params": params})
    return answer["choices"][0]["token_ids"]


class Served:
    """A server, its folders, and publishers to it; ``options`` are those of :func:`start_server`."""

    def __init__(self, cfg: Config, root: Path, **options: Any) -> None:
        self.cfg, self.root, self.options = cfg, root, options
        self.model = write_model(cfg, root / "model")
        self.process = start_server(cfg, self.model, root / "server", **options)
        self.client = ServerClient(self.process.url, self.process.token, timeout_s=60)

    def publisher(self, transport: str) -> WeightPublisher:
        """``transport`` may end in ``without buckets`` or ``with buckets``, for ipc."""
        return WeightPublisher(
            self.process.url,
            self.process.token,
            transport=transport.partition(" ")[0],
            ipc_buckets={"without": False, "with": True}.get(transport.partition(" ")[2].partition(" ")[0]),
            device=torch.device(self.device),
            max_bucket_bytes=256 << 10,
            folder=self.root / "sync",
            write_folder=checkpoint_writer(self.model),
            timeout_s=60,
        )

    def publish(self, transport: str, weights: dict[str, torch.Tensor], version: int) -> PublishReport:
        if transport == "ranks":
            device = next(iter(weights.values())).device
            by_ranks = shares_publisher(self.process.url, self.process.token, self.cfg, device)
            try:
                return by_ranks.publish(*own_shares(self.cfg, weights), policy_version=version)
            finally:
                by_ranks.close()
        publisher = self.publisher(transport)
        try:
            return publisher.publish(exported(weights), policy_version=version)
        finally:
            publisher.close()

    def versions(self) -> list[int | None]:
        return [state["policy_version"] for state in self.client.collective("weight_state")]

    def live_bytes(self, rank: int) -> dict[str, torch.Tensor]:
        self.client.collective("show_parameters", str(self.root))
        return load_file(self.root / f"rank{rank}.safetensors")

    def start_trainer(self, transport: str, weight_seed: int, version: int, phase: str = "halfway") -> subprocess.Popen:
        """A trainer process, held at a phase of its update, see publisher_process.py."""
        return self.start_held("publisher_process.py", self.model, transport, self.device, weight_seed, version, phase=phase)

    @property
    def device(self) -> str:
        """The trainer's."""
        return "cuda:0" if self.cfg.run.backend == "cuda" else "cpu"

    def start_held(self, script: str, *words: Any, phase: str) -> subprocess.Popen:
        """A trainer process of this folder, given this server, ``words``, a file and a phase: held there while the file exists."""
        hold = self.root / "hold"
        words = (self.process.url, self.process.log.parent / "server.token", *words, hold, phase)
        # as the command line sets it: warnings of C++ name nothing that a user can act on
        environ = os.environ | {"TORCH_CPP_LOG_LEVEL": "ERROR"}
        command = [sys.executable, HERE / script, *map(str, words)]
        trainer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ)
        deadline = time.monotonic() + 300
        while not hold.exists():
            assert trainer.poll() is None, trainer.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return trainer


def assert_live(served: Served, weights: dict[str, torch.Tensor], *, rank: int = 0, size: int = 1, expert: bool = False) -> None:
    """Every FP8 parameter of a rank has the bytes that the slow reference cuts out of ``weights``."""
    config = json.loads((served.model / "config.json").read_text())
    live, expected = served.live_bytes(rank), fused_fp8(config, weights, rank, size, expert=expert)
    assert len(expected) == 2 * 4 * config["num_hidden_layers"]
    for name, tensor in expected.items():
        assert torch.equal(live[name].view(tensor.dtype), tensor), (rank, name)
