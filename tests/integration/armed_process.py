"""A trainer that publishes one tuple twice, announces a third version of it, and stops at one phase for as long as a file exists.

Usage: ``python armed_process.py URL TOKEN_FILE TRANSPORT DEVICE SEED NEXT_SEED VERSION HOLD_FILE PHASE``. It publishes weights of SEED as
VERSION - 1 and VERSION, writes those of NEXT_SEED into the same memory, and creates HOLD_FILE when it has come to PHASE: ``armed``, the
engine waits for its word; ``go``, it has given that word and has not seen that everything is written; ``compare``, without an
announcement, the server generates and the bytes are not compared.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from integration.trainer_cases import case_config, exported, random_weights, wait_while_held

from e2e_fp8.errors import UserError
from e2e_fp8.sync.announcer import ArmedUpdate
from e2e_fp8.sync.publisher import WeightPublisher


def main(url: str, token_file: str, transport: str, device: str, seed: str, next_seed: str, version: str, hold: str, phase: str) -> int:
    where, cfg, new = torch.device(device), case_config(), int(version) + 1
    weights = {name: tensor.to(where) for name, tensor in random_weights(cfg, int(seed)).items()}
    entries = tuple(exported(weights))
    buckets = {"ipc_buckets": False} if transport == "ipc" else {}
    timeout_s = 5.0 if phase == "compare" else 60.0
    publisher = WeightPublisher(url, Path(token_file).read_text(), transport=transport, device=where, timeout_s=timeout_s, **buckets)

    def wait_here() -> None:
        wait_while_held(Path(hold))

    written = ArmedUpdate.written

    def held(self: ArmedUpdate) -> None:
        wait_here()
        written(self)

    try:
        for settled in (new - 2, new - 1):
            publisher.publish(entries, policy_version=settled)
        assert phase == "compare" or publisher.arm(new), publisher.not_armed
        for name, tensor in random_weights(cfg, int(next_seed)).items():
            weights[name].copy_(tensor)
        if phase == "compare":
            proof = publisher._comparisons.proof
            publisher._comparisons.proof = lambda *args, **options: (wait_here(), proof(*args, **options))[1]
            publisher.publish(entries, policy_version=new, before="answers").settled()
            return 0
        if phase == "armed":
            wait_here()
        else:
            ArmedUpdate.written = held
        report = publisher.publish(entries, policy_version=new)
        assert report.armed
    except UserError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
