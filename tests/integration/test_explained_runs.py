"""``align explain`` on real engines: the mixture of experts, its weights after four supervised steps, every cause; and a trained run."""

import json
import os
import subprocess
import sys

import pytest
from tiny_runs import ROOT, python_path

from e2e_fp8.config.alignment import CAUSES
from e2e_fp8.config.alignment_explain import WHAT_IF

CONFIG = str(ROOT / "configs" / "quickstart.yaml")
# four whole steps, so that BF16 weights of norms are no longer 1: until then both sides' norms agree
WARM = "training.warm_start={steps: 4, batch_size: 32, learning_rate: 4.0e-3, warmup_steps: 0}"
TINY = ["run.backend=cpu", WARM, "rollout.group_size=4", "rollout.prompts_per_step=4", "rollout.max_num_seqs=16"]

pytestmark = pytest.mark.slow


def command(*arguments: str, overrides=()) -> subprocess.CompletedProcess:
    words = [item for override in overrides for item in ("--set", override)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1", "PYTHONPATH": python_path(ROOT)}
    line = [sys.executable, "-m", "e2e_fp8.cli", *arguments, *words]
    return subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def explained(tmp_path_factory):
    out = tmp_path_factory.mktemp("explain")
    gates = "numerics.alignment_gates={total: 0.0, swiglu: 1.0, attention.abs_max: 1.0e6}"
    done = command("align", "explain", CONFIG, "--prompts", "4", "--out", str(out), overrides=[*TINY, gates])
    assert (out / "explain.json").exists(), done.stderr[-3000:]
    return done, out, json.loads((out / "explain.json").read_text())


def test_the_baseline_is_zero_and_every_cause_has_a_row_of_its_own(explained):
    _, _, record = explained
    rows = {row["name"]: row for row in record["rows"]}
    measured = {name for name in WHAT_IF if name not in record["not_measured"]}
    # the CPU has one FP8 product and one kind of experts
    assert {"gemm_triton", "gemm_cutlass", "moe_backend"} <= WHAT_IF.keys() - measured
    assert WHAT_IF.keys() - measured <= {"gemm_triton", "gemm_cutlass", "moe_backend", "staleness"}
    assert rows.keys() == {"baseline", *CAUSES, "total", *measured}
    assert record["baseline_is_zero"]
    assert rows["baseline"]["metrics"]["mismatch_kl"] == 0
    assert rows["baseline"]["changed_experts"] == [0, 0]
    different = {name for name, row in rows.items() if row["metrics"]["abs_max"] > 0}
    assert {"rms_norm", "residual_add", "qk_norm", "final_norm", "rotary", "router_gemm", "total", *(measured - {"staleness"})} <= different
    # the CPU has one operator for both choices of this one
    assert rows["activation_scales"]["metrics"]["abs_max"] == 0


def test_the_same_tokens_decoded_again_have_the_log_probs_of_the_rollout(explained):
    _, _, record = explained
    assert record["sampled_again_abs_max"] == 0


def test_places_of_the_configuration_add_up_to_its_row(explained):
    _, _, record = explained
    total = next(row["metrics"] for row in record["rows"] if row["name"] == "total")
    assert max(p["abs_max"] for p in record["positions"]) == total["abs_max"]
    assert sum(p["tokens"] for p in record["positions"]) == record["tokens"]
    leaf = record["first_module"]["module"].rpartition(".")[2]
    assert leaf in {link for cause in CAUSES.values() for link in cause.links}
    assert (record["modules"][0]["module"], record["modules"][0]["relative_error"]) == ("embedding", 0)
    assert len(record["modules"]) == 2 * 17 + 4


def test_the_exceeded_gate_alone_is_named(explained):
    done, out, record = explained
    assert done.returncode == 1
    assert len(record["violations"]) == 1
    assert "numerics.alignment_gates.total is exceeded" in done.stderr
    assert "baseline" in done.stdout
    assert (out / "explain.png").read_bytes().startswith(b"\x89PNG")


def test_a_bitwise_run_has_nothing_to_explain(tmp_path):
    settings = [*TINY, "run.steps=1", "run.name=tiny", f"run.out_dir={tmp_path}", "numerics.alignment=bitwise", "run.eval_interval=0"]
    trained = command("train", CONFIG, overrides=settings)
    assert trained.returncode == 0, trained.stderr[-3000:]
    gates = "numerics.alignment_gates={total: 0.0, total.abs_max: 0.0, attention: 0.0}"
    done = command("align", "explain", str(tmp_path / "tiny"), "--prompts", "4", "--json", overrides=[gates])
    assert done.returncode == 0, done.stderr[-3000:]
    record = json.loads((tmp_path / "tiny" / "explain.json").read_text())
    assert [row["name"] for row in record["rows"] if row["kind"] != "what_if"] == ["baseline", "total"]
    assert record["first_module"] is None
    last = json.loads((tmp_path / "tiny" / "metrics.jsonl").read_text().splitlines()[-1])
    assert record["policy_version"] == last["policy_version"] > 4
    assert json.loads(done.stdout[done.stdout.index("{") :]) == record
