"""The trainer's end of a weight sync in the tests: random weights and publishers; imports no engine, which takes ten seconds."""

import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))
from random_models import exported, hf_config, random_weights

from e2e_fp8.config.root import Config
from e2e_fp8.layout import EngineParallel, MegatronParallel, hf_tensors, megatron_shards
from e2e_fp8.layout.plan import Plan
from e2e_fp8.numerics.quantization_plan import QuantizationPlan
from e2e_fp8.sync.control import UpdateControl
from e2e_fp8.sync.rank_publisher import RankPublisher

__all__ = ["case_config", "exported", "hf_config", "own_shares", "random_weights", "shares_publisher", "wait_while_held"]


def case_config(
    architecture: str = "qwen3_moe", *, device: str = "cpu", tensor_parallel: int = 1, expert_parallel: bool = False, **model: Any
) -> Config:
    return Config.model_validate(
        {
            "model": {"architecture": architecture, **model},
            "rollout": {
                "placement": "server",
                "temperature": 0.7,
                "max_response_tokens": 12,
                "max_model_len": 64,
                "max_num_seqs": 32,
                "kv_cache_gib": 1,
                "tensor_parallel": tensor_parallel,
                "expert_parallel": expert_parallel,
            },
            "sync": {"transport": "ipc"},
            "run": {"backend": device, "seed": 3},
        }
    )


def wait_while_held(hold: Path) -> None:
    """Make the file, and wait for as long as it exists."""
    hold.touch()
    while hold.exists():
        time.sleep(0.02)


def own_shares(cfg: Config, weights: dict[str, torch.Tensor]) -> tuple[list[dict[str, torch.Tensor]], list[dict[str, torch.Tensor]]]:
    """(tensors, scales) of a trainer of one rank, by Megatron's names."""
    predicate, tensors, scales = QuantizationPlan.from_config(cfg).is_fp8, {}, {}
    for shard in megatron_shards(hf_config(cfg), MegatronParallel(), 0, qkv_order="engine", spec="local", fp8=predicate):
        sources = dict.fromkeys(part.hf_name for part in shard.parts)
        raw = [weights[name].view(torch.uint8) if shard.fp8 else weights[name] for name in sources]
        tensors[shard.name] = torch.cat(raw).view(weights[next(iter(sources))].dtype)
        if shard.fp8:
            scales[shard.name] = torch.cat([weights[f"{name}_scale_inv"] for name in sources])
    return [tensors], [scales]


def shares_publisher(url: str, token: str, cfg: Config, device: torch.device) -> RankPublisher:
    """What publishes :func:`own_shares`, over the ``ranks`` transport."""
    predicate = QuantizationPlan.from_config(cfg).is_fp8
    parallel = EngineParallel(tensor=cfg.rollout.tensor_parallel, expert=cfg.rollout.expert_parallel)
    plan = Plan.from_config(hf_config(cfg), MegatronParallel(), parallel, qkv_order="engine", spec="local", fp8=predicate)
    control, listed = UpdateControl(url, token, timeout_s=60), list(hf_tensors(hf_config(cfg), predicate))
    return RankPublisher(control, plan, listed, rank=0, device=device, timeout_s=60, max_bytes=256 << 10)
