"""Router replay between a real engine and a real trainer in one process: ``replay_process.py OUT_DIR {cpu|cuda}`` writes ``result.pt``.

One engine serves everything, because a process can start one: samples with prefix-cache hits and preemptions, log-probs with and
without replay, and three RL steps, two of them twice, from one state of the trainer.
"""

import sys
from dataclasses import asdict, replace
from pathlib import Path

import torch
from megatron.core.transformer.moe.router_replay import RouterReplayAction

from e2e_fp8.config.load import load_config
from e2e_fp8.observability.names import check_names
from e2e_fp8.observability.timers import PhaseTimer
from e2e_fp8.orchestration.batching import pack_samples, response_values
from e2e_fp8.orchestration.replay import coverage_metrics, routing_of
from e2e_fp8.orchestration.rl_step import run_step
from e2e_fp8.orchestration.session import Session, open_session
from e2e_fp8.rollout import engine
from e2e_fp8.types import Prompt, Sample

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml"
BLOCK = 32
"""Tokens of a KV-cache block; vLLM's default on a CPU is 128."""
OVERRIDES = (
    "training.router_replay.mode=R3_weights_order",
    "training.minibatches_per_step=2",
    "model.num_experts=8",
    "model.num_experts_per_tok=4",
    "rollout.prompts_per_step=2",
    "rollout.group_size=4",
    "rollout.max_response_tokens=28",
    "rollout.max_model_len=128",
    "task.train_size=64",
    "task.held_out_size=8",
    "run.threads=1",
)


def few_blocks() -> None:
    """Seven usable KV-cache blocks, so that the engine has to preempt."""
    whole = engine.engine_args
    engine.engine_args = lambda *a, **k: whole(*a, **k) | {"num_gpu_blocks_override": 8, "block_size": BLOCK}


def prompts(generator: torch.Generator) -> list[Prompt]:
    """Three prompts with more than one block in common."""
    common = torch.randint(3, 100, (BLOCK + 8,), generator=generator).tolist()
    return [Prompt(uid=f"p{i}", text="", token_ids=(*common, 3 + i, 3 + i), answer="") for i in range(3)]


def own_choices(session: Session, sample: Sample) -> torch.Tensor:
    """``[n, L, k]`` ids that the trainer chooses for a sample."""
    hooks = [layer.hook for layer in session.trainer.router_replays.layers]
    for hook in hooks:
        hook.set_router_replay_action(RouterReplayAction.RECORD)
    session.trainer.token_stats(pack_samples([sample], torch.ones(1), max_tokens=4096, device=session.trainer.device))
    found = torch.stack([hook.get_recorded_indices().cpu() for hook in hooks], dim=1)
    for hook in hooks:
        hook.stop()
    return found


def log_prob_differences(session: Session, samples: list[Sample], mode: str) -> list[float]:
    """Trainer minus engine, token by token: without replay, with ids, with weights and order."""
    routings = None
    if mode != "disabled":
        routings = [routing_of(s, session.cfg) for s in samples]
        routings = routings if mode == "R3_weights_order" else [replace(r, weights=None) for r in routings]
    batches = pack_samples(samples, torch.ones(len(samples)), max_tokens=4096, device=session.trainer.device, routings=routings)
    values = response_values(
        batches, [s.log_probs - b.rollout_log_probs for s, b in zip(session.trainer.token_stats(batches), batches, strict=True)]
    )
    return torch.cat(values).tolist()


def steps(session: Session, first: int, last: int) -> list[dict[str, float]]:
    """RL steps, each with its receipt; every name must be in the table of metrics."""
    found = []
    for step in range(first, last):
        found.append(run_step(session, step, PhaseTimer(), census=False).record)
        check_names(found[-1])
    return found


def masters(session: Session) -> dict[str, torch.Tensor]:
    """A copy of every FP32 master."""
    return {name: master.to("cpu", copy=True) for name, master in session.trainer.named_masters()}


def main(out: Path, device: str) -> None:
    """Sample, compare, train."""
    few_blocks()
    session = open_session(load_config(CONFIG, [*OVERRIDES, f"run.backend={device}"]), out / "model")
    result: dict = {}
    try:
        session.sync()
        items = prompts(torch.Generator().manual_seed(1))
        alone = [session.generate([item], group_size=2, seed=5) for item in items]
        crowd = session.generate(items, group_size=3, seed=5)
        samples = [*(s for pair in alone for s in pair), *crowd]
        result["samples"] = [asdict(s) | {"own": own_choices(session, s)} for s in samples]
        result["differences"] = {m: log_prob_differences(session, samples, m) for m in ("disabled", "R3", "R3_weights_order")}
        result["coverage"] = coverage_metrics(samples, [routing_of(s, session.cfg) for s in samples], masked=True)
        session.trainer.take_replay_counts()
        first = steps(session, 0, 1)
        state = session.trainer.state_dict()
        result["steps"], result["masters"] = first + steps(session, 1, 3), masters(session)
        session.trainer.load_state_dict(state)
        session.sync()
        result["resumed_steps"], result["resumed_masters"] = steps(session, 1, 3), masters(session)
    finally:
        session.close()
    torch.save(result, out / "result.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
