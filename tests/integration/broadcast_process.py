"""One end of the ``nccl`` transport alone, no trainer or engine around it: an update in which one end dies.

Usage: ``python broadcast_process.py END FOLDER DEVICE WHOLE_BYTES VICTIM MESSAGE``, END and VICTIM ``sender`` or ``receiver``. Three
tensors of WHOLE_BYTES are sent as they lie, then small ones that are packed, then three as they lie. The victim kills itself where it
would start its MESSAGE-th message: at the first the ends have met and NCCL has connected nothing; at the third the other end packs (or
unpacks), for the first time in its life, beside a message that never ends.
"""

import faulthandler
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from integration.notes import await_note, leave_note

from e2e_fp8.errors import EngineError
from e2e_fp8.sync.broadcasts import NcclReceiver, NcclSender
from e2e_fp8.sync.buckets import UpdateManifest, plan_update
from e2e_fp8.sync.copies import CopyPlan
from e2e_fp8.sync.process_group import BroadcastGroup

WHOLE, SMALL = 6, 40


def die_at(message: int) -> None:
    call, started = BroadcastGroup.broadcast, 0

    def broadcast(group: BroadcastGroup, buffer: torch.Tensor) -> Any:
        nonlocal started
        started += 1
        if started == message:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        return call(group, buffer)

    BroadcastGroup.broadcast = broadcast


def weights(device: torch.device, whole_bytes: int) -> dict[str, torch.Tensor]:
    large = {f"whole.{i}": torch.full((whole_bytes,), i + 1, dtype=torch.uint8, device=device) for i in range(WHOLE)}
    return large | {f"small.{i}": torch.full((64 + i,), i, dtype=torch.bfloat16, device=device) for i in range(SMALL)}


def send(folder: Path, device: torch.device, tensors: dict[str, torch.Tensor]) -> None:
    whole = tensors["whole.0"].nbytes
    manifest = plan_update(list(tensors.items()), policy_version=1, max_bytes=2 * whole, alone_bytes=whole)

    def init(message: dict[str, Any]) -> None:
        leave_note(folder / "init", json.dumps({"manifest": manifest.to_json(), "parameters": message["parameters"]}))

    def announce(*_: Any, **__: Any) -> None:
        await_note(folder / "dead")
        raise EngineError("The rollout server is gone.")

    sender = NcclSender(device, engine_ranks=1, host="127.0.0.1", timeout_s=60)
    sender.open(manifest, tensors, init)
    sender.send(manifest, tensors, announce)


def receive(folder: Path, device: torch.device, tensors: dict[str, torch.Tensor]) -> None:
    told = json.loads(await_note(folder / "init"))
    manifest = UpdateManifest.from_json(told["manifest"])
    receiver = NcclReceiver(told["parameters"], rank=1, device=device)
    update = {"buckets": list(range(len(manifest.buckets)))}
    for _, named in receiver.receive(update, manifest, lambda spec: tensors[spec.name]):
        CopyPlan([(tensors[name], tensor) for name, tensor in named.items()]).run()


def main(end: str, folder: str, device: str, whole_bytes: str, victim: str, message: str) -> int:
    where = torch.device(device)
    if end == victim:
        die_at(int(message))
    # says where it hangs, before the test gives it up
    faulthandler.dump_traceback_later(60, exit=True)
    try:
        {"sender": send, "receiver": receive}[end](Path(folder), where, weights(where, int(whole_bytes)))
    except (EngineError, RuntimeError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        # without the library's own farewell, which waits for the peer
        os._exit(2)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
