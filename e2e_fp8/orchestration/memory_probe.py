"""``memory/*`` of one step: trainer, engine, host and device."""

import torch

from e2e_fp8.observability.memory import group_processes, host_used_fraction, imbalance, resident_gib
from e2e_fp8.orchestration.ranks.driver import DrivingEngine, trainer_gib
from e2e_fp8.orchestration.session import Session
from e2e_fp8.rollout.server_engine import ServerEngine

_WORKER = "VLLM::Worker"
"""How vLLM titles the processes of its ranks."""


def memory_metrics(session: Session) -> dict[str, float]:
    """What is in use now; an engine in the trainer's process counts as the trainer's, a server that others started is not seen."""
    record = {"memory/host_used_fraction": host_used_fraction(), "memory/trainer_host_gib": resident_gib()}
    trainer = session.trainer
    if trainer.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(trainer.device)
        record |= {"memory/device_used_fraction": 1.0 - free / total, "memory/trainer_device_gib": trainer_gib(trainer.device)}
    if isinstance(trainer, DrivingEngine):
        ranks = imbalance(trainer.memory_of_ranks())
        if ranks is not None:
            record["memory/trainer_imbalance"] = ranks
    engine = session.rollout
    if isinstance(engine, ServerEngine) and engine.process is not None:
        record |= server_memory(engine.process.pid)
    return record


def server_memory(group: int) -> dict[str, float]:
    """Host memory of a server's process group: sum, and imbalance between its ranks where it has several."""
    sizes = [(resident_gib(pid), command) for pid, command in group_processes(group)]
    record = {"memory/engine_host_gib": sum(size for size, _ in sizes)}
    ranks = imbalance([size for size, command in sizes if command.startswith(_WORKER)])
    return record if ranks is None else record | {"memory/engine_imbalance": ranks}
