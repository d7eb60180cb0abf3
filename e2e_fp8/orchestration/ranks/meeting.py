"""Before the ranks have a process group: rank 0 hands its configuration over, and one of them says why the job ends.

Both go through the launcher's key-value store (``MASTER_ADDR:MASTER_PORT``). torchrun's lives in its own process, so that it answers
after a rank has died; under other launchers it lives in rank 0.
"""

import os
from datetime import timedelta
from typing import Any

from torch.distributed.rendezvous import rendezvous

from e2e_fp8.config.root import Config
from e2e_fp8.errors import ConfigError, RankError
from e2e_fp8.rank_grid import RankGrid

_PATIENCE = timedelta(minutes=30)
_CONFIG, _TOLD = "e2e_fp8/config", "e2e_fp8/told"
_store: Any = None


def check_ranks(cfg: Config, world: int) -> None:
    """Refuse what ``world`` ranks cannot run.

    Raises:
        ConfigError: parallel sizes do not fit, or rank 0 of several would start vLLM in its own process.
    """
    RankGrid.of(cfg.training.parallel, world)
    if world > 1 and cfg.rollout.placement == "in_process":
        raise ConfigError(
            f"rollout.placement is in_process, but the job has {world} ranks: vLLM would build its process groups over all of them and "
            "wait forever. Set rollout.placement=server and sync.transport=ipc (or nccl, for GPUs that the trainer does not use)."
        )


def _meet() -> Any:
    """The launcher's store; kept open, since the server under rank 0 ends with it."""
    global _store
    if _store is None:
        try:
            _store, _, _ = next(rendezvous("env://", timeout=_PATIENCE))
        except (RuntimeError, ValueError) as error:
            address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            raise RankError(f"The trainer's ranks did not meet at {address} ({error}): start all of them, with torchrun.") from error
    return _store


def hand_over(cfg: Config) -> None:
    """On rank 0: the configuration for all others.

    Raises:
        RankError: the ranks do not meet within half an hour.
    """
    _meet().set(_CONFIG, cfg.model_dump_json())


def take_over() -> Config:
    """On the others: the configuration of rank 0.

    Raises:
        RankError: rank 0 does not come, or ended before it handed anything over.
    """
    store = _meet()
    try:
        text = store.get(_CONFIG)
    except RuntimeError as error:
        raise RankError("Rank 0 of the trainer ended before the others knew what to do; look at its message.") from error
    return Config.model_validate_json(text)


def is_first_to_tell() -> bool:
    """Whether no rank has said yet why the job ends; the caller is taken to say it now. True where nobody else can be asked."""
    if _store is None:
        return True
    try:
        return _store.add(_TOLD, 1) == 1
    except RuntimeError:
        return True
