"""Before the ranks have a process group: rank 0 hands its configuration over, and one of them says why the job ends.

Both go through the launcher's key-value store (``MASTER_ADDR:MASTER_PORT``). torchrun's lives in its own process, so that it answers
after a rank has died; under other launchers it lives in rank 0.
"""

import os
import sys
import traceback
from datetime import timedelta
from typing import Any, NoReturn

from torch.distributed.rendezvous import rendezvous

from e2e_fp8.config.root import Config
from e2e_fp8.errors import ConfigError, RankError, UserError
from e2e_fp8.rank_grid import RankGrid

_PATIENCE = timedelta(minutes=30)
_CONFIG, _TOLD = "e2e_fp8/config", "e2e_fp8/told"
_store: Any = None
_is_said = False
_shown: list[BaseException] = []
LOST_STATUS, _BUG_STATUS = 2, 1
AGAIN = "Start all ranks again with --resume: the steps since the last checkpoint are done again."


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
    global _is_said
    first, _is_said = not _is_said, True
    if not first or _store is None:
        return first
    try:
        return _store.add(_TOLD, 1) == 1
    except RuntimeError:
        return True


def note_said() -> None:
    """Another rank has said why the job ends, even if the store is gone."""
    global _is_said
    _is_said = True


def reason_of(error: BaseException, rank: int) -> str:
    """Why ``rank`` ends: a UserError's own sentence, or one that names the bug whose traceback is in that rank's output."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, KeyboardInterrupt):
        return f"Rank {rank} of the trainer was interrupted. {AGAIN}"
    (first, *_) = "".join(traceback.format_exception_only(error)).strip().splitlines()
    return f"Rank {rank} of the trainer failed with {first[:400]} (traceback in its own output). {AGAIN}"


def say_why(error: BaseException, rank: int) -> None:
    """One sentence on standard error, unless a rank has said one already; before it the traceback of a bug, once in this process.

    An interrupt only counts as said: the command line has its own sentence for it.
    """
    if not isinstance(error, UserError | KeyboardInterrupt) and error not in _shown:
        _shown.append(error)
        traceback.print_exception(error)
    if is_first_to_tell() and not isinstance(error, KeyboardInterrupt):
        print(f"e2e-fp8: {reason_of(error, rank)}", file=sys.stderr)
    sys.stderr.flush()


def leave(error: BaseException, rank: int) -> NoReturn:
    """End this process because of ``error``: at once, since its process groups may wait for ranks that are gone."""
    say_why(error, rank)
    sys.stdout.flush()
    os._exit(LOST_STATUS if isinstance(error, UserError) else _BUG_STATUS)
