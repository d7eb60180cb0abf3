"""A process that computes rewards: ``python -m e2e_fp8.tasks.reward_worker``, started by :class:`WorkerPool` alone.

Requests come in as length and pickle over the parent's pipe; answers go back as length and JSON, so that nothing a reward or the
code of a policy produced is ever unpickled. The real standard output is kept for answers, and what rewards print goes to stderr.
"""

import ctypes
import json
import os
import pickle
import signal
import struct
import sys
from dataclasses import dataclass
from typing import IO, Any, cast

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class _Item:
    """What rewards read of a Prompt; the class itself would import torch."""

    uid: str
    text: str
    answer: str
    metadata: dict[str, Any]


def read_frame(stream: IO[bytes]) -> bytes | None:
    """One message; None at the end of the stream."""
    head = stream.read(8)
    if len(head) < 8:
        return None
    (size,) = struct.unpack("<Q", head)
    body = stream.read(size)
    return body if len(body) == size else None


def write_frame(stream: IO[bytes], body: bytes) -> None:
    """Send one message."""
    stream.write(struct.pack("<Q", len(body)) + body)
    stream.flush()


def main() -> int:
    """Build the rewards of the first message's task, then score each further message until the parent closes the pipe."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    requests = sys.stdin.buffer
    first = read_frame(requests)
    if first is None:
        return 0
    search_path, task_values = pickle.loads(first)
    sys.path[:] = search_path
    from e2e_fp8.config.task import TaskConfig
    from e2e_fp8.errors import UserError
    from e2e_fp8.tasks.rewards import reward_functions, strict_score

    def answer(call: Any) -> None:
        try:
            result = {"value": call()}
        except UserError as error:
            result = {"error": str(error)}
        write_frame(answers, json.dumps(result).encode())

    functions: dict[str, Any] = {}
    answer(lambda: functions.update(reward_functions(TaskConfig.model_validate(task_values))))
    while (body := read_frame(requests)) is not None:
        fields, response = pickle.loads(body)
        prompt = cast(Any, _Item(*fields))
        answer(lambda prompt=prompt, response=response: [strict_score(f, prompt, response) for f in functions.values()])
    return 0


if __name__ == "__main__":
    sys.exit(main())
