"""A worker call behind a pause, in one message to vLLM's engine core.

vLLM has a message for the pause and one for the call. Between processes that sleep until they are needed each takes about a millisecond,
as long as an H200 takes to copy two gigabytes. The core looks its methods up by name, so that one more can be given to it.
"""

from concurrent.futures import Future
from typing import Any

METHOD = "e2e_fp8_paused_call"
"""Name of :func:`paused_call` in the core."""


def paused_call(core: Any, mode: str, method: str, args: tuple[str, ...]) -> Any:
    """Pause generation as ``core.pause_scheduler(mode)`` does, caches cleared, and once that is complete call ``method`` of every worker.

    Generation stays paused. Returns the workers' results, or a Future of them when requests have to end first.
    """
    paused = core.pause_scheduler(mode, True)
    if paused is None:
        return core.collective_rpc(method, None, tuple(args))
    results: Future = Future()

    def call(ended: Future) -> None:
        try:
            ended.result()
            results.set_result(core.collective_rpc(method, None, tuple(args)))
        except Exception as error:
            # as vLLM does for any utility call, which answers with the error
            results.set_exception(error)

    paused.add_done_callback(call)
    return results


def register_paused_call() -> None:
    """Give vLLM's engine core the method. May be called again."""
    from vllm.v1.engine.core import EngineCoreProc

    setattr(EngineCoreProc, METHOD, paused_call)
