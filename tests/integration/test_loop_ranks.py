"""The whole loop over two trainer ranks: real torchrun, real command line, real vLLM server."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gpus import places
from rank_cases import free_port
from tiny_runs import ROOT, TINY, python_path, records

from e2e_fp8.orchestration.checkpoint import CheckpointStore

SETS = [
    *TINY,
    "model.num_key_value_heads=2",
    "rollout.placement=server",
    "sync.transport=ipc",
    "run.steps=2",
    "run.checkpoint_interval=2",
]
GRIDS = {
    "dp2": [],
    "tp2": ["training.parallel.tensor=2"],
    "pp2": ["training.parallel.pipeline=2"],
    "ep2": ["training.parallel.expert=2"],
    "cp2": ["training.parallel.context=2"],
    "critic_dp2": ["objective.kind=ppo", "objective.advantage=gae"],
    "dp2_audited": ["numerics.alignment=bitwise", "training.old_log_probs=rollout", "training.old_log_probs_audit=0.2"],
    "ep2_bitwise": ["training.parallel.expert=2", "numerics.alignment=bitwise"],
    "pp2_bitwise": ["training.parallel.pipeline=2", "numerics.alignment=bitwise"],
    "straight_from_tp2": ["training.parallel.tensor=2", "sync.transport=ranks"],
}


def sets(out: Path, name: str, *more: str) -> list[str]:
    return [word for item in (*SETS, f"run.out_dir={out}", f"run.name={name}", *more) for word in ("--set", item)]


@pytest.fixture
def start():
    """``start(*words)``: torchrun of two ranks of ``train``; ended after the test, if it still runs."""
    jobs: list[subprocess.Popen[str]] = []

    def begin(*words: str) -> subprocess.Popen[str]:
        jobs.append(torchrun(*words))
        return jobs[-1]

    yield begin
    for job in jobs:
        if job.poll() is None:
            for pid in rank_pids(job).values():
                os.kill(pid, signal.SIGKILL)
            job.kill()
            job.communicate()


TWO_HOSTS = 'PET_NODE_RANK=1 NCCL_HOSTID=host-1 "$@" & PET_NODE_RANK=0 NCCL_HOSTID=host-0 "$@"; code=$?; wait $! && exit $code'


def torchrun(*words: str, hosts: int = 1) -> subprocess.Popen[str]:
    """Two ranks of ``train``, on one host or as two that share its GPU with each other and with the server."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    launch += ["--nnodes", str(hosts), "--nproc-per-node", str(2 // hosts)]
    launch += ["scripts/train_megatron.py"] if hosts == 1 else ["tests/integration/apart_train.py", "train"]
    launch += ["configs/quickstart.yaml", *words]
    if hosts > 1:
        launch = ["sh", "-c", TWO_HOSTS, "sh", *launch]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": python_path(ROOT)}
    return subprocess.Popen(launch, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(job: subprocess.Popen[str], timeout: float = 850) -> tuple[int, str, str]:
    stdout, stderr = job.communicate(timeout=timeout)
    return job.returncode, stdout, stderr


def rank_pids(job: subprocess.Popen[str]) -> dict[int, int]:
    """Process id of each rank."""
    found = {}
    # any thread of torchrun may be the parent
    for pid in [pid for task in Path(f"/proc/{job.pid}/task").iterdir() for pid in (task / "children").read_text().split()]:
        environ = dict(part.split("=", 1) for part in Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0") if "=" in part)
        if "RANK" in environ:
            found[int(environ["RANK"])] = int(pid)
    return found


def wait_for_lines(path: Path, lines: int, job: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 400
    while not path.exists() or len(path.read_text().splitlines()) < lines:
        assert job.poll() is None, job.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def own_sentences(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if line.startswith("e2e-fp8: ")]


@pytest.mark.server
@pytest.mark.timeout(900)
@pytest.mark.parametrize("grid", [pytest.param(grid, marks=[] if grid == "tp2" else pytest.mark.slow) for grid in GRIDS])
def test_whole_loop(grid, start, tmp_path):
    check_loop(start, tmp_path, grid)


def check_loop(start, out: Path, grid: str, *more: str) -> None:
    """From the warm start to the report, with a server that rank 0 starts; then a command that reads the run in one process."""
    code, stdout, stderr = finish(start(*sets(out, grid, *GRIDS[grid], *more)))
    assert code == 0, stderr[-4000:]
    run = out / grid
    assert stdout.strip().splitlines()[-1] == str(run)
    steps = records(run, "metrics.jsonl")
    assert [s["phase"] for s in steps] == [0.0, 0.0, 1.0, 1.0]
    for step in steps[2:]:
        assert step["receipt/passed"] == 1.0
        assert 0 <= step["mismatch_kl"] < 0.05
        if "numerics.alignment=bitwise" in GRIDS[grid]:
            assert (step["mismatch_kl"], step["train_rollout_logprob_abs_diff/max"]) == (0, 0)
        assert 0 <= step["rollout/prefix_cache_hit_rate"] <= 1
        assert step["skipped_steps"] + step["policy_version"] > 2
        # the first audit is of all 16 samples, then each of two ranks takes a fifth of its own
        if "old_log_probs/audited_sequences" in step:
            assert (step is steps[2]) == (step["old_log_probs/audited_sequences"] == 16)
            assert step["old_log_probs/audited_sequences"] >= 2
            assert (step["old_log_probs/audit_failures"], step["mismatch_kl"]) == (0, 0)
    assert ("old_log_probs/audited_sequences" in steps[-1]) == (grid == "dp2_audited")
    assert "reward/held_out" in steps[-1]
    assert steps[-1]["tiles/weights/zero"] >= 0
    receipts = records(run, "receipts.jsonl")
    assert [r["passed"] for r in receipts] == [True] * 3
    assert len({r["digest"] for r in receipts}) == 3
    assert (run / "report.html").exists()
    assert CheckpointStore(run / "checkpoints", keep=2).load(4, rank=1)["policy"]["policy_version"] == steps[-1]["policy_version"]
    checked = subprocess.run(
        [sys.executable, "-m", "e2e_fp8.cli", "receipt", "verify", str(run), "4"], capture_output=True, text=True, timeout=300, cwd=ROOT
    )
    # FP32 masters put together from both shares, rounded and quantized again, are what the engine held
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["training.parallel.tensr=2"], "training.parallel.tensr"),
        pytest.param(
            ["training.parallel.tensor=2", "training.parallel.pipeline=2"],
            "2 ranks, which is not a multiple of tensor x context x pipeline = 4",
            marks=pytest.mark.slow,
        ),
        (["rollout.placement=in_process", "sync.transport=local"], "Set rollout.placement=server and sync.transport=ipc"),
    ],
    ids=["field", "ranks", "placement"],
)
def test_a_bad_configuration_is_one_sentence_once(more, sentence, start, tmp_path):
    code, _, stderr = finish(start(*sets(tmp_path, "bad", *more)), timeout=300)
    assert code != 0
    (said,) = own_sentences(stderr)
    assert sentence in said
    assert "exitcode  : 2" in stderr
    assert stderr.count("Traceback (most recent call last)") == 1, "torchrun's own alone"
    assert not (tmp_path / "bad" / "config.yaml").exists()


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_job_with_one_sentence(victim, start, tmp_path):
    job = start(*sets(tmp_path, "killed", "training.warm_start.steps=100000"))
    wait_for_lines(tmp_path / "killed" / "metrics.jsonl", 3, job)
    os.kill(rank_pids(job)[victim], signal.SIGKILL)
    began = time.monotonic()
    code, _, stderr = finish(job, timeout=120)
    assert time.monotonic() - began < 60
    assert code != 0
    (said,) = own_sentences(stderr)
    assert f"Rank {victim} of the trainer is gone: its process ended without a word" in said
    assert stderr.count("Traceback (most recent call last)") == 1, "torchrun's own alone"


BUG = """
import os
import sys

from e2e_fp8.cli.main import main
from e2e_fp8.training.megatron_model import MegatronModel

if os.environ["RANK"] == os.environ["BUGGY_RANK"]:
    step = MegatronModel._accumulate_gradients

    def third(self, *rest):
        if self.policy_version == 2:
            raise KeyError("of the third step")
        return step(self, *rest)

    MegatronModel._accumulate_gradients = third
sys.exit(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("broken", [0, 1])
def test_a_bug_on_one_rank_ends_both_without_a_launcher(broken, tmp_path):
    check_bug(broken, tmp_path)


def check_bug(broken: int, out: Path, *more: str) -> None:
    """Two plain processes, which nobody kills; the steps before are in the report."""
    (out / "buggy.py").write_text(BUG)
    words = [sys.executable, str(out / "buggy.py"), "train", "configs/quickstart.yaml"]
    words += sets(out, "bug", "training.warm_start.steps=100", *more)
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": python_path(ROOT)}
    environ |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "BUGGY_RANK": str(broken)}
    numbers = [{"RANK": str(rank), "LOCAL_RANK": str(place.gpu)} | place.environ for rank, place in enumerate(places(2))]
    ranks = [subprocess.Popen(words, cwd=ROOT, env=environ | number, stderr=subprocess.PIPE, text=True) for number in numbers]
    try:
        told = [rank.communicate(timeout=300)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [1 if rank == broken else 2 for rank in range(2)]
    (said,) = own_sentences("\n".join(told))
    assert f"Rank {broken} of the trainer failed with KeyError: 'of the third step' (traceback in its own output)" in said
    assert [text.count("Traceback (most recent call last)") for text in told] == [int(rank == broken) for rank in range(2)]
    assert [record["step"] for record in records(out / "bug", "metrics.jsonl")] == [1, 2]
    assert (out / "bug" / "report.html").exists()


@pytest.mark.slow
@pytest.mark.server
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_interrupted_ranks_leave_a_checkpoint_and_resume_to_the_same_bytes(number, start, tmp_path):
    warm = "training.warm_start.steps=40"
    straight = start(*sets(tmp_path, "straight", warm, "run.steps=0", "run.eval_interval=0"))
    code, _, stderr = finish(straight)
    assert code == 0, stderr[-4000:]
    words = sets(tmp_path, "halves", warm, "run.steps=0", "run.eval_interval=0")
    job = start(*words)
    wait_for_lines(tmp_path / "halves" / "metrics.jsonl", 3, job)
    job.send_signal(number)
    code, _, stderr = finish(job)
    assert code != 0
    assert ["interrupted" in line for line in own_sentences(stderr)] == [True], stderr[-3000:]
    store = CheckpointStore(tmp_path / "halves" / "checkpoints", keep=2)
    stopped_at = store.latest()
    assert stopped_at is not None
    assert 3 <= stopped_at < 40
    code, _, stderr = finish(start(*words, "--resume"))
    assert code == 0, stderr[-4000:]
    left, right = (tmp_path / name for name in ("straight", "halves"))
    assert records(left, "receipts.jsonl")[-1]["digest"] == records(right, "receipts.jsonl")[-1]["digest"]
    for rank in (0, 1):
        name = "trainer" if rank == 0 else "policy"
        ours, theirs = (CheckpointStore(run / "checkpoints", keep=2).load(40, rank=rank)[name]["parameters"] for run in (left, right))
        assert ours.keys() == theirs.keys()
        for parameter, tensors in ours.items():
            assert all((tensors[key] == theirs[parameter][key]).all() for key in tensors), (rank, parameter)
