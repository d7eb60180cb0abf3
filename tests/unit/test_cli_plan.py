"""``e2e-fp8 plan`` in real processes: verdicts, refusals with exit code 2, listings, JSON; without torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

CONFIGS = Path(__file__).parents[1] / "data" / "hf_configs"
LOOK = """
import sys
from e2e_fp8.cli.main import main
code = main(sys.argv[1:])
print("torch" in sys.modules, file=sys.stderr)
sys.exit(code)
"""


def plan(*args: str, model: str = "Qwen3-30B-A3B") -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", LOOK, "plan", "--model", str(CONFIGS / f"{model}.json"), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_plan_that_passes_is_a_table():
    result = plan("--train-tp", "4", "--train-ep", "4", "--train-etp", "1", "--rollout-tp", "2")
    assert result.returncode == 0, result.stderr
    assert "training: tp 4 pp 1 ep 4 etp 1, 4 ranks; rollout: tp 2 dp 1, 2 ranks" in result.stdout
    assert "model.layers.{0-47}.mlp.experts.routed_experts.w13_weight  pass" in result.stdout
    assert result.stderr.strip() == "False"  # torch was not imported


def test_a_refused_plan_says_what_where_and_what_would_work():
    result = plan("--train-tp", "4", "--rollout-tp", "4")
    assert result.returncode == 2
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert lines[0] == "e2e-fp8: FP8 bytes cannot pass unchanged into 2 of 4 kinds of engine parameter:"
    assert any("w2_weight: vLLM refuses experts of 192 rows a rank" in line for line in lines)
    assert any(line.startswith("These would work: --train-tp 4 --train-etp 1") for line in lines)


def test_json_has_verdicts_totals_and_the_chosen_copies():
    result = plan("--rollout-tp", "2", "--rank", "1", "--tensor", "model.layers.7.self_attn.*", "--format", "json")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert {one["verdict"] for one in found["verdicts"]} == {"pass"}
    assert found["totals"]["copies"] > 0
    assert {copy["target"] for copy in found["copies"]} == {
        f"model.layers.7.self_attn.{name}.weight" for name in ("qkv_proj", "o_proj", "q_norm", "k_norm")
    }
    last = next(copy for copy in found["copies"] if copy["target"].endswith("o_proj.weight"))
    # rank 1 of 2 needs the right half of the 4096 columns: 16 of 32 columns of scales
    assert (last["source_col"], last["cols"], last["tiles"]["source_col"], last["tiles"]["cols"]) == (2048, 2048, 16, 16)


def test_a_listing_has_rows_and_columns():
    result = plan("--tensor", "model.layers.0.self_attn.qkv_proj.weight", "--qkv-order", "megatron")
    assert result.returncode == 0
    lines = [line.split() for line in result.stdout.splitlines()[1:]]
    # four groups of 8 query heads, key, value: twelve runs of rows
    assert [line[2] for line in lines] == [
        *("0-1024", "1280-2304", "2560-3584", "3840-4864"),
        *("1024-1152", "2304-2432", "3584-3712", "4864-4992"),
        *("1152-1280", "2432-2560", "3712-3840", "4992-5120"),
    ]
    assert len(plan("--tensor", "model.layers.0.self_attn.qkv_proj.weight", "--qkv-order", "engine").stdout.splitlines()) == 2


def test_a_run_yaml_gives_model_and_sizes(tmp_path):
    (tmp_path / "run.yaml").write_text("run: {name: tiny}\n")
    command = [sys.executable, "-m", "e2e_fp8.cli", "plan", "--model", str(tmp_path / "run.yaml")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert "qwen3_moe, 2 layers" in result.stdout


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["--train-tp", "0"], "at least 1"),
        (["--train-tp", "3"], "does not divide by 3"),
        (["--train-pp", "5"], "do not spread evenly"),
        (["--rank", "9"], "ranks 0 to 0"),
        (["--rollout-tp", "256", "--rollout-ep"], "cannot be dealt out"),
    ],
)
def test_a_mistake_is_one_sentence(args, part):
    result = plan(*args)
    assert result.returncode == 2
    assert part in result.stderr
    assert "Traceback" not in result.stderr


def test_an_unreadable_model_is_one_sentence(tmp_path):
    result = plan(model="../nowhere/missing")
    assert result.returncode == 2
    assert "cannot be read as a model's config.json" in result.stderr
