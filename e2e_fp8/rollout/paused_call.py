"""A worker call behind a pause, in one message to vLLM's engine core.

vLLM has a message for the pause and one for the call. Between processes that sleep until they are needed each takes about a millisecond,
as long as an H200 takes to copy two gigabytes. The core looks its methods up by name, so that one more can be given to it.
"""

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

METHOD = "e2e_fp8_paused_call"
"""Name of :func:`paused_call` in the core."""


def is_whole(result: Mapping[str, Any]) -> bool:
    """Whether what ``WorkerExtension.weight_update`` answered says that the update is finished and its weights may be used."""
    return "state" in result and not result["state"]["refusal"]


def paused_call(core: Any, mode: str, method: str, args: tuple[str, ...], resume: bool = False) -> Any:
    """Pause generation as ``core.pause_scheduler(mode)`` does, caches cleared, and once that is complete call ``method`` of every worker.

    Generation stays paused, but for ``resume``, when every worker's update is whole. Returns the workers' results, or a Future of them when
    requests have to end first.
    """

    def called() -> list[dict[str, Any]]:
        results = core.collective_rpc(method, None, tuple(args))
        if resume and all(map(is_whole, results)):
            core.resume_scheduler()
        return results

    paused = core.pause_scheduler(mode, True)
    if paused is None:
        return called()
    results: Future = Future()

    def call(ended: Future) -> None:
        try:
            ended.result()
            results.set_result(called())
        except Exception as error:
            # as vLLM does for any utility call, which answers with the error
            results.set_exception(error)

    paused.add_done_callback(call)
    return results


def register_paused_call() -> None:
    """Give vLLM's engine core the method. May be called again."""
    from vllm.v1.engine.core import EngineCoreProc

    setattr(EngineCoreProc, METHOD, paused_call)
