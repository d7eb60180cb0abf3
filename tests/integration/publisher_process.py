"""A trainer that publishes once, and stops at one phase for as long as a file exists.

Usage: ``python publisher_process.py URL TOKEN_FILE MODEL_DIR TRANSPORT DEVICE WEIGHT_SEED VERSION HOLD_FILE PHASE``. It creates HOLD_FILE
when it has come to PHASE: ``open``, the server has accepted the names and nothing else; ``halfway``, two buckets are packed, broadcast or
sent, or the checkpoint of the disk transport is half written; ``receipt``, all bytes are there and none is compared; ``resume``, all
are compared.
"""

import faulthandler
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from integration.trainer_cases import case_config, exported, own_shares, random_weights, shares_publisher, wait_while_held

from e2e_fp8.errors import UserError
from e2e_fp8.export.policy_folder import checkpoint_writer
from e2e_fp8.sync import buckets
from e2e_fp8.sync.comparisons import Comparisons
from e2e_fp8.sync.control import UpdateControl
from e2e_fp8.sync.process_group import BroadcastGroup, PairGroup
from e2e_fp8.sync.publisher import WeightPublisher
from e2e_fp8.sync.rank_publisher import RankPublisher


def replaced(owner: Any, name: str, before: Callable[[], None]) -> None:
    """Have ``owner.name`` call ``before`` first."""
    call = getattr(owner, name)

    def both(*args: Any, **options: Any) -> Any:
        before()
        return call(*args, **options)

    setattr(owner, name, both)


def stop_at(phase: str, hold: Path) -> Callable[[], None]:
    """Patch what comes after ``phase`` so that it waits; the wait itself, for what is not patched here."""
    done = 0

    def wait_here() -> None:
        wait_while_held(hold)
        # a trainer that hangs says where, before the test gives it up
        faulthandler.dump_traceback_later(100, exit=True)

    def count() -> None:
        nonlocal done
        if done == 2:
            wait_here()
        done += 1

    if phase == "halfway":
        for owner, name in ((buckets, "pack"), (BroadcastGroup, "broadcast"), (PairGroup, "send")):
            replaced(owner, name, count)
    elif phase == "receipt":
        for owner, name in ((Comparisons, "proof"), (RankPublisher, "_receipt")):
            replaced(owner, name, wait_here)
    else:
        replaced(UpdateControl, {"open": "open_channel", "resume": "resume"}[phase], wait_here)
    return wait_here


def main(url: str, token_file: str, model: str, transport: str, device: str, seed: str, version: str, hold: str, phase: str) -> int:
    wait_here, write = stop_at(phase, Path(hold)), checkpoint_writer(Path(model))

    def slow_write(folder, tensors, policy_version) -> None:
        (folder.with_name(folder.name + ".partial")).mkdir(parents=True)
        if phase == "halfway":
            wait_here()
        write(folder, tensors, policy_version)

    where, token, cfg = torch.device(device), Path(token_file).read_text(), case_config()
    weights = {name: tensor.to(where) for name, tensor in random_weights(cfg, int(seed)).items()}
    try:
        if transport == "ranks":
            publisher = shares_publisher(url, token, cfg, where)
            publisher.publish(*own_shares(cfg, weights), policy_version=int(version))
        else:
            options = {"max_bucket_bytes": 256 << 10, "folder": Path(hold).parent / "sync", "write_folder": slow_write, "timeout_s": 60}
            publisher = WeightPublisher(url, token, transport=transport, device=where, **options)
            publisher.publish(exported(weights), policy_version=int(version))
    except UserError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
