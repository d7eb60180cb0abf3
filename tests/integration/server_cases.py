"""Real vLLM servers for the tests: model folders, random weights, and an extension that shows live bytes."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))
from rollout_engine_process import exported, hf_config, random_weights

from e2e_fp8.config.root import Config
from e2e_fp8.rollout.engine import engine_args
from e2e_fp8.rollout.environment import rollout_environment
from e2e_fp8.rollout.server_process import EXTENSION, ServerProcess, server_flags
from e2e_fp8.rollout.worker_extension import WorkerExtension

__all__ = ["case_config", "exported", "generate", "random_weights", "start_server", "write_model"]
HERE = Path(__file__).resolve().parent


class ShowingExtension(WorkerExtension):
    """The real extension, which also writes the worker's raw parameters to a folder."""

    def show_parameters(self, folder: str) -> dict[str, Any]:
        transfer = self.weight_transfer_engine
        rank = self.vllm_config.parallel_config.rank
        shown = {n: p.detach().cpu().clone().contiguous() for n, p in transfer.model.named_parameters() if p.numel()}
        save_file(shown, Path(folder) / f"rank{rank}.safetensors")
        return {}


def case_config(architecture: str = "qwen3_moe", *, device: str = "cpu", tensor_parallel: int = 1, **model: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"architecture": architecture, **model},
            "rollout": {
                "placement": "server",
                "temperature": 0.7,
                "max_response_tokens": 12,
                "max_model_len": 64,
                "max_num_seqs": 32,
                "tensor_parallel": tensor_parallel,
            },
            "sync": {"transport": "ipc"},
            "run": {"backend": device, "seed": 3},
        }
    )


def write_model(cfg: Config, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config(cfg)))
    return folder


def start_server(cfg: Config, model: Path, folder: Path, **changes: Any) -> ServerProcess:
    """A server of ``model`` with :class:`ShowingExtension`; ``changes`` replace keyword arguments of ``vllm.LLM``."""
    device = cfg.run.backend
    args = engine_args(cfg, model, device=device, is_moe=cfg.model.is_moe, fp8=True) | changes
    flags = ["integration.server_cases.ShowingExtension" if flag == EXTENSION else flag for flag in server_flags(args)]
    environ = {**os.environ, **rollout_environment(cfg, device=device)}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH", "")]))
    if cfg.rollout.tensor_parallel > 1 and device == "cpu":
        environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(i % (os.cpu_count() or 1)) for i in range(cfg.rollout.tensor_parallel))
    return ServerProcess(flags, environ, folder, timeout_s=400)


def generate(client, prompt: tuple[int, ...] = (2, 3, 7, 5), seed: int = 3) -> list[int]:
    """Token ids of one completion, as a plain HTTP client gets them."""
    params = {"temperature": 0.7, "max_tokens": 8, "seed": seed, "detokenize": False}
    answer = client.post("/inference/v1/generate", {"token_ids": list(prompt), "sampling_params": params})
    return answer["choices"][0]["token_ids"]
