"""RL steps into a server whose syncs are announced, one of which fails after its announcement: ``armed_loop_process.py OUT_DIR``
writes ``result.json``."""

import json
import sys
from pathlib import Path

from e2e_fp8.config.load import load_config
from e2e_fp8.observability.names import check_names
from e2e_fp8.observability.timers import PhaseTimer
from e2e_fp8.orchestration.rl_step import run_step
from e2e_fp8.orchestration.session import Session, open_session
from e2e_fp8.rollout.server_engine import ServerEngine

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml"
OVERRIDES = (
    "rollout.placement=server",
    "sync.transport=nccl",
    "training.minibatches_per_step=2",
    "rollout.prompts_per_step=4",
    "rollout.group_size=4",
    "task.train_size=64",
    "task.held_out_size=8",
    "run.threads=1",
    "run.backend=cpu",
)
"""On a CPU ``ipc`` has buckets, and such a sync is not announced."""


def responses(session: Session) -> list[list[int]]:
    return [list(s.response_token_ids) for s in session.generate(session.task.held_out[:2], group_size=2, seed=7)]


def main(out: Path) -> None:
    """Three steps, one that fails in its last optimizer step, and the same again."""
    session = open_session(load_config(CONFIG, OVERRIDES), out / "model")
    records = []

    def step(number: int) -> None:
        records.append(run_step(session, number, PhaseTimer(), census=False).record)
        check_names(records[-1])

    try:
        session.sync()
        for number in range(3):
            step(number)
        assert isinstance(session.rollout, ServerEngine)
        before, version, trains, passed = responses(session), session.rollout.policy_version, session.trainer.train_step, []

        def fails_at_last(*args):
            if passed:
                assert session.rollout.publisher._announcer._armed is not None
                raise KeyboardInterrupt
            passed.append(trains(*args))
            return passed[0]

        session.trainer.train_step = fails_at_last
        failed = False
        try:
            step(3)
        except KeyboardInterrupt:
            failed = True
        session.trainer.train_step = trains
        result = {"failed": failed, "before": before, "after": responses(session), "version": version}
        result["versions"] = [session.rollout.control.policy_version()]
        step(3)
        result |= {"armed": [r["sync/armed"] for r in records], "receipts": [r["receipt/passed"] for r in records]}
    finally:
        session.close()
    (out / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
