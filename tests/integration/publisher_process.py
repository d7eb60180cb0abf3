"""A trainer that publishes once, and stops at one phase for as long as a file exists.

Usage: ``python publisher_process.py URL TOKEN_FILE MODEL_DIR TRANSPORT WEIGHT_SEED VERSION HOLD_FILE PHASE``. It creates HOLD_FILE when it
has come to PHASE: ``open``, the server has accepted the names and nothing else; ``halfway``, two buckets are packed or broadcast, or the
checkpoint of the disk transport is half written; ``receipt``, all bytes are there and none is compared; ``resume``, all are compared.
"""

import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from integration.server_cases import case_config, exported, random_weights

from e2e_fp8.errors import UserError
from e2e_fp8.export.policy_folder import checkpoint_writer
from e2e_fp8.sync import buckets
from e2e_fp8.sync.control import UpdateControl
from e2e_fp8.sync.process_group import BroadcastGroup
from e2e_fp8.sync.publisher import WeightPublisher


def main(url: str, token_file: str, model: str, transport: str, seed: str, version: str, hold: str, phase: str) -> int:
    done, pack, broadcast = 0, buckets.pack, BroadcastGroup.broadcast

    def wait_here() -> None:
        Path(hold).touch()
        while Path(hold).exists():
            time.sleep(0.02)

    def count() -> None:
        nonlocal done
        if done == 2 and phase == "halfway":
            wait_here()
        done += 1

    def slow_pack(*args) -> None:
        count()
        pack(*args)

    def slow_broadcast(*args):
        count()
        return broadcast(*args)

    buckets.pack = slow_pack
    BroadcastGroup.broadcast = slow_broadcast
    write = checkpoint_writer(Path(model))

    def slow_write(folder, tensors, policy_version) -> None:
        (folder.with_name(folder.name + ".partial")).mkdir(parents=True)
        if phase == "halfway":
            wait_here()
        write(folder, tensors, policy_version)

    def held(call):
        def wait_and_call(*args, **options):
            wait_here()
            return call(*args, **options)

        return wait_and_call

    if phase == "open":
        UpdateControl.open_channel = held(UpdateControl.open_channel)
    elif phase == "receipt":
        WeightPublisher._receipt = held(WeightPublisher._receipt)
    elif phase == "resume":
        UpdateControl.resume = held(UpdateControl.resume)
    try:
        publisher = WeightPublisher(
            url,
            Path(token_file).read_text(),
            transport=transport,
            device=torch.device("cpu"),
            max_bucket_bytes=256 << 10,
            folder=Path(hold).parent / "sync",
            write_folder=slow_write,
            timeout_s=60,
        )
        publisher.publish(exported(random_weights(case_config(), int(seed))), policy_version=int(version))
    except UserError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
