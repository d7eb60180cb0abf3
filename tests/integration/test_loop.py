"""The loop in real processes: Megatron-Core and vLLM on the CPU, through the command line.

One run goes through undisturbed; a second is interrupted by SIGINT and resumed. Both must end with the same bytes.
"""

import json
import subprocess
from pathlib import Path

import pytest
from safetensors import safe_open
from tiny_runs import ROOT, assert_same_run, command, interrupt_after, interrupt_and_resume, python_path, records, run, train_command

from e2e_fp8.cli.main import main
from e2e_fp8.orchestration.checkpoint import CheckpointStore
from e2e_fp8.sync.receipt import manifest_of
from e2e_fp8.types import ExportedTensor


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("runs")
    done = run(train_command(out, "straight", "run.steps=4", "run.checkpoint_interval=4"))
    assert done.returncode == 0, done.stderr[-3000:]
    return out / "straight"


def test_records_receipts_and_report(straight):
    rl = [r for r in records(straight) if r["phase"] == 1.0]
    assert [r["step"] for r in rl] == [3, 4, 5, 6]
    assert all(r["receipt/passed"] == 1.0 and r["receipt/tensors"] > 0 for r in rl)
    assert all(r["receipt/share_of_sync"] > 0 and r["receipt/gb_per_s"] > 0 for r in rl)
    assert all(0 <= r["mismatch_kl"] < 0.05 for r in rl)
    assert all(r["grad_norm"] > 0 for r in rl if r["groups/degenerate"] < r["groups/total"])
    assert any("tiles/gradients/zero" in r and "reward/held_out" in r for r in rl)
    receipts = records(straight, "receipts.jsonl")
    assert len(receipts) == 5
    assert len({r["digest"] for r in receipts if r["step"] >= 3}) > 1
    html = (straight / "report.html").read_text()
    assert "mismatch" in html.lower()
    assert "http://" not in html.replace("http://www.w3.org", "")


def test_interrupted_and_resumed_run_ends_with_the_same_bytes(straight, tmp_path):
    words = train_command(tmp_path, "halves", "run.steps=4", "run.checkpoint_interval=4")
    interrupt_and_resume(words, tmp_path / "halves", after=4, steps=6)
    assert_same_run(straight, tmp_path / "halves", 6)


def test_shared_memory_run_is_the_same_run_and_copies_less(straight, tmp_path):
    done = run(train_command(tmp_path, "shared", "run.steps=4", "run.checkpoint_interval=0", "sync.transport=shared"))
    assert done.returncode == 0, done.stderr[-3000:]
    shared = tmp_path / "shared"
    assert [r["digest"] for r in records(shared, "receipts.jsonl")] == [r["digest"] for r in records(straight, "receipts.jsonl")]
    copied, whole = ({r["sync/bytes"] for r in records(d) if r["phase"] == 1.0} for d in (shared, straight))
    assert len(copied) == len(whole) == 1
    # the vocabulary that vLLM pads; no FP8 byte, and routers are the trainer's memory
    assert 0 < copied.pop() < whole.pop() - records(shared, "receipts.jsonl")[-1]["bytes"]


@pytest.mark.slow
def test_second_interrupt_stops_at_once_and_keeps_the_last_checkpoint(tmp_path):
    words = train_command(tmp_path, "twice", "run.steps=50", "run.checkpoint_interval=1", "training.minibatches_per_step=1")
    code, stderr = interrupt_after(words, tmp_path / "twice" / "metrics.jsonl", lines=4, signals=2)
    assert code == 130
    assert "Traceback" not in stderr
    assert "--resume" in stderr
    store = CheckpointStore(tmp_path / "twice" / "checkpoints", keep=2)
    assert 3 <= store.load_latest()["global_step"] < 12


def test_prompt_too_long_is_one_sentence_before_anything_starts(tmp_path):
    done = run(train_command(tmp_path, "long", "rollout.max_model_len=12"))
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "more than the 4 that rollout.max_model_len leaves" in done.stderr
    assert not (tmp_path / "long" / "config.yaml").exists()


def test_a_run_is_never_overwritten(straight):
    done = run(train_command(straight.parent, "straight", "run.steps=4"))
    assert done.returncode == 2
    assert "already holds a run" in done.stderr
    assert "Traceback" not in done.stderr


def verified(capsys, *words: object) -> tuple[int, str, str]:
    """Exit code, output and errors of ``e2e-fp8 receipt verify`` in this process, which has torch already."""
    return (main(["receipt", "verify", *map(str, words)]), *capsys.readouterr())


def test_export_holds_the_bytes_of_the_last_receipt(straight, tmp_path, capsys):
    done = run(command("export", straight, "--out", tmp_path / "hf"))
    assert done.returncode == 0, done.stderr[-3000:]
    entries = []
    for shard in sorted((tmp_path / "hf").glob("*.safetensors")):
        with safe_open(shard, "pt") as file:
            entries += [ExportedTensor(name=n, tensor=file.get_tensor(n)) for n in file.keys()]  # noqa: SIM118
    assert manifest_of(entries).combined == records(straight, "receipts.jsonl")[-1]["digest"]
    code, *told = verified(capsys, straight, 6, "--checkpoint", tmp_path / "hf")
    assert code == 0, told
    code, stdout, _ = verified(capsys, straight, 5, "--checkpoint", tmp_path / "hf")
    assert code == 1
    assert "kept no table of that step" in stdout
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["quantization_config"]["weight_block_size"] == [128, 128]
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == {e.name for e in entries}


def test_receipts_verify_the_runs_own_checkpoint(straight, capsys):
    """FP32 masters, rounded and quantized again without either engine, give the bytes that the engine held."""
    done = run(command("receipt", "verify", straight, 6))
    assert done.returncode == 0, done.stdout + done.stderr
    last = records(straight, "receipts.jsonl")[-1]
    assert last["covered"] == "fp8"
    assert last["rank"] == 0
    assert f"{last['tensors']} tensors, {last['bytes']:,} bytes, covered: fp8, digest {last['digest']}\nequal\n" in done.stdout
    assert [p.name for p in (straight / "receipts").iterdir()] == ["step_00000006.rank_0.tsv"]
    code, _, stderr = verified(capsys, straight, 3)
    assert code == 2
    assert "has no checkpoint of step 3 to compare with (it has those of steps 6)" in stderr
    code, _, stderr = verified(capsys, straight, 99)
    assert code == 2
    assert "no receipt of step 99: there are receipts of steps 2-6." in stderr


def test_eval_reports_the_held_out_reward_of_the_run(straight):
    done = run(command("eval", straight))
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout[done.stdout.index("{") :])
    assert result["reward/held_out"] == pytest.approx(records(straight)[-1]["reward/held_out"], abs=1e-9)


def test_dense_with_reference_kl_disk_transport_and_calibrated_clipping(tmp_path):
    overrides = (
        "run.steps=3",
        "objective.calibration.interval=2",
        "objective.clip_low=0.01",
        "run.checkpoint_interval=0",
        "objective.kl_coef=0.1",
        "sync.transport=disk",
        "training.minibatches_per_step=2",
    )
    done = run(train_command(tmp_path, "dense", *overrides, config="quickstart_dense"))
    assert done.returncode == 0, done.stderr[-3000:]
    rl = [r for r in records(tmp_path / "dense") if r["phase"] == 1.0]
    assert len(rl) == 3
    assert all(r["receipt/passed"] == 1.0 for r in rl)
    assert all(r["clip_calibration/passes"] == 1.0 and r["time/shadow_pass"] > 0 for r in rl)
    assert all(0.002 <= r["clip_calibration/clip_low"] <= 0.05 for r in rl)
    report = (tmp_path / "dense/report.html").read_text()
    assert "shadow_pass" in report
    assert "Clip ranges in use" in report
    assert rl[0]["kl_ref"] >= 0
    assert rl[1]["kl_ref"] > 0
    assert rl[-1]["policy_version"] == 2 + 3 * 2


BAD_REWARD = """
from pathlib import Path

DONE = Path(__file__).with_name("gspo") / "metrics.jsonl"


def nan_later(prompt, response, answer, metadata):
    return float("nan") if len(DONE.read_text().splitlines()) > 2 else 0.25 + len(response) / 8


def constant(prompt, response, answer, metadata):
    return 1.0
"""


def test_everything_rejected_skips_the_steps_and_a_nan_reward_in_the_next_is_one_sentence(tmp_path):
    """verl 3984: an empty mask ends the run there. GSPO's sequences, rejected by a bound that no two precisions meet."""
    (tmp_path / "bad_reward.py").write_text(BAD_REWARD)
    overrides = ("run.steps=2", "run.eval_interval=0", "run.checkpoint_interval=0", "training.minibatches_per_step=2")
    reject = ("correction.preset=null", "correction.rollout_rs=seq_max_k3", "correction.rollout_rs_threshold=1e-30")
    words = train_command(tmp_path, "gspo", *overrides, *reject, "task.reward=bad_reward:nan_later", config="objectives/gspo")
    done = run(words, {"PYTHONPATH": python_path(tmp_path)})
    record = records(tmp_path / "gspo")[-1]
    assert record["step"] == 3
    assert record["skipped_steps"] == 2.0
    assert record["rollout_corr/rollout_rs_masked_fraction"] == 1.0
    assert record["tokens/trained"] == 0.0
    assert record["policy_version"] == 2.0
    assert record["receipt/passed"] == 1.0
    assert "loss" not in record
    assert done.returncode == 2
    assert "must be a finite number" in done.stderr
    assert "Traceback" not in done.stderr
    assert CheckpointStore(tmp_path / "gspo" / "checkpoints", keep=2).latest() == 3, "the steps before must not be lost"


PPO = (
    "run.steps=3",
    "run.checkpoint_interval=3",
    "run.eval_interval=0",
    "training.minibatches_per_step=2",
    "objective.critic.critic_warmup=1",
    "task.reward=length_reward:length",
)
LENGTH_REWARD = """
def length(prompt, response, answer, metadata):
    return 0.25 + len(response) / 8
"""
"""A policy of two warm-start steps seldom earns the task's own reward, and a critic of zeros has nothing to learn from zeros."""


def run_ppo(folder: Path, words: list[str]) -> subprocess.CompletedProcess[str]:
    (folder / "length_reward.py").write_text(LENGTH_REWARD)
    return run(words, {"PYTHONPATH": python_path(ROOT, folder)})


@pytest.fixture(scope="module")
def ppo(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("ppo")
    done = run_ppo(out, train_command(out, "ppo", *PPO, config="objectives/ppo_gae"))
    assert done.returncode == 0, done.stderr[-3000:]
    return out / "ppo"


def test_ppo_trains_its_critic_first_and_then_both(ppo):
    first, *rest = [r for r in records(ppo) if r["phase"] == 1.0]
    assert (first["policy_version"], first["tokens/trained"], first["learning_rate"]) == (2.0, 0.0, 0.0)
    assert "time/update" not in first
    assert [r["policy_version"] for r in rest] == [4.0, 6.0]
    for r in (first, *rest):
        assert r["receipt/passed"] == 1.0
        assert r["critic/grad_norm"] > 0
        assert r["critic/skipped_steps"] == 0.0
        assert r["time/values"] > 0
        assert r["time/update_critic"] > 0
        assert r["critic/advantages/mean"] == pytest.approx(0.0, abs=1e-5)
    # a head of zeros has no values, and explains nothing
    assert first["critic/values/max"] == first["critic/values/min"] == 0.0
    assert first["critic/vf_explained_var"] == pytest.approx(0.0, abs=1e-3)
    assert rest[0]["critic/values/max"] > rest[0]["critic/values/min"]
    assert all(r["grad_norm"] > 0 for r in rest)
    state = CheckpointStore(ppo / "checkpoints", keep=2).load(5)
    assert state["critic"]["policy_version"] == 6
    assert state["critic"]["parameters"]["output_layer.weight"]["master"].numel() == 256
    html = (ppo / "report.html").read_text()
    assert "Value loss" in html
    assert "update_critic" in html


@pytest.mark.slow
def test_interrupted_and_resumed_ppo_ends_with_the_same_bytes(ppo, tmp_path, monkeypatch):
    """By hand: two more engine starts."""
    monkeypatch.setenv("PYTHONPATH", python_path(ROOT, ppo.parent))
    words = train_command(tmp_path, "halves", *PPO, config="objectives/ppo_gae")
    interrupt_and_resume(words, tmp_path / "halves", after=3, steps=5)
    assert_same_run(ppo, tmp_path / "halves", 5)


def test_a_run_without_a_critic_is_not_continued_with_one(straight):
    words = train_command(straight.parent, "straight", "run.steps=5", "objective.kind=ppo", "objective.advantage=gae", resume=True)
    done = run(words)
    assert done.returncode == 2
    assert "the checkpoint of step 6 has no critic: restore objective.advantage to resume" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_equal_rewards_are_counted_and_give_no_gradient(tmp_path):
    (tmp_path / "bad_reward.py").write_text(BAD_REWARD)
    words = train_command(tmp_path, "equal", "run.steps=1", "task.reward=bad_reward:constant", "run.eval_interval=0")
    done = run(words, {"PYTHONPATH": python_path(tmp_path)})
    assert done.returncode == 0, done.stderr[-3000:]
    last = records(tmp_path / "equal")[-1]
    assert last["groups/degenerate"] == last["groups/total"] == 4
    assert last["grad_norm"] == 0
