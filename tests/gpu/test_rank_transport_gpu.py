"""``sync.transport: ranks`` between GPUs (NCCL): one trainer rank and one engine rank, into plain tensors, a server, and a whole loop.

Each on a GPU of its own where there are two, see integration/gpus.py.
"""

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "integration"))
from gpus import ENGINE, TRAINER, places
from rank_cases import Case, rank_environment, start_apart, write_case
from test_ranks_to_engines import WIDE, check_transfer
from tiny_runs import APART, PLAIN, command, records, run, train_command

PROCESS = Path(__file__).with_name("rank_transport_process.py")
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]


@pytest.mark.parametrize("model", [WIDE, WIDE | {"architecture": "qwen3"}], ids=["moe", "dense"])
def test_rectangles_go_from_a_trainer_to_an_engine(model, tmp_path):
    case = Case(world=1, model=model, steps=1, backend="cuda", more={"engines": 1, "max_bytes": 80 << 10})
    write_case(case, tmp_path / "out")
    start_apart(case, tmp_path / "out", engines=1)
    check_transfer(case, tmp_path / "out", engines=1)


@pytest.mark.parametrize("architecture", ["qwen3_moe", "qwen3"])
def test_a_server_holds_every_version_of_a_trainer(architecture, tmp_path):
    words = [sys.executable, PROCESS, architecture, "cuda", tmp_path]
    environment = rank_environment() | {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=350, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.splitlines()[-1] == "ok"
    print(done.stdout)


@pytest.mark.parametrize("config", ["quickstart", "quickstart_dense"])
def test_whole_loop_of_one_rank_straight_into_the_engine(config, tmp_path):
    gpu = places(2)[ENGINE].gpu
    sets = ["run.backend=cuda", "run.threads=0", "rollout.placement=server", "sync.transport=ranks", f"rollout.server_devices='{gpu}'"]
    sets += ["rollout.kv_cache_gib=2", "run.steps=3", "run.checkpoint_interval=5"]
    done = run(train_command(tmp_path, "r", *sets, config=config, program=APART if gpu == TRAINER else PLAIN))
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-4000:]
    steps = [step for step in records(tmp_path / "r") if step["phase"] == 1.0]
    assert len(steps) == 3
    for step in steps:
        assert step["receipt/passed"] == 1.0
        assert 0 <= step["mismatch_kl"] < 0.05
    receipts = records(tmp_path / "r", "receipts.jsonl")
    assert [receipt["passed"] for receipt in receipts] == [True] * 4
    assert len({receipt["digest"] for receipt in receipts}) == 4
    checked = run(command("receipt", "verify", tmp_path / "r", 5))
    assert checked.returncode == 0, checked.stdout + checked.stderr
