"""``numerics.alignment: bitwise`` on the CPU: every link of the parity chain holds on a real trainer and a real engine, and breaks when
something is wrong, at the module that is wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from e2e_fp8.alignment.chain import Chain, chain_config
from e2e_fp8.alignment.compare import Difference, Link
from e2e_fp8.cli.align import report
from e2e_fp8.cli.main import main
from e2e_fp8.config.alignment import CAUSES
from e2e_fp8.config.load import load_config
from e2e_fp8.errors import ConfigError
from e2e_fp8.rollout.shared_operators import REPLACED

PROCESS = Path(__file__).with_name("alignment_process.py")
CONFIGS = {"dense": "quickstart_dense.yaml", "moe": "quickstart.yaml"}
QUICKSTART = PROCESS.parents[2] / "configs" / "quickstart.yaml"
LINKS = ["bytes", "trainer batch", "decode", "engine batch", "chunked", "prefix cache", "modules", "log-probs"]
LAYER_MODULES = {"dense": 15, "moe": 17}


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """Both processes at once: most of their time is imports and vLLM's start."""
    folder = tmp_path_factory.mktemp("alignment")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
    processes = {}
    for name, config in CONFIGS.items():
        with (folder / f"{name}.log").open("w") as log:
            command = [sys.executable, str(PROCESS), config, str(folder / f"{name}.json")]
            processes[name] = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    yield folder, processes
    for process in processes.values():
        process.kill()
        process.wait()


@pytest.fixture(params=list(CONFIGS))
def found(request, started):
    folder, processes = started
    assert processes[request.param].wait() == 0, (folder / f"{request.param}.log").read_text()[-3000:]
    return request.param, json.loads((folder / f"{request.param}.json").read_text())


def test_every_link_holds_at_the_start_and_after_training(found):
    name, record = found
    for moment in ("start", "trained"):
        links = {link["name"]: link for link in record[moment]}
        assert list(links) == LINKS
        assert {k: v["difference"] for k, v in links.items()} == dict.fromkeys(LINKS)
        for module_by_module in ("trainer batch", "decode", "modules"):
            assert links[module_by_module]["modules"] == 2 * LAYER_MODULES[name] + 4
            assert links[module_by_module]["elements"] > 200_000


def test_the_engine_reports_the_operators_that_it_has(found):
    name, record = found
    replaced = {*REPLACED, "final_norm", "head"} - (set() if name == "moe" else {"router_gemm", "top_k", "gate_normalization", "combine"})
    assert set(record["live"]) == set(record["live_native"]) == replaced
    for cause in replaced:
        assert record["live"][cause]["native"] == record["live_native"][cause]["shared"] == 0, cause
        assert record["live"][cause]["shared"] == record["live_native"][cause]["native"] > 0, cause
    assert record["live"]["qk_norm"]["shared_at"][:2] == [f"model.layers.0.self_attn.{x}_norm" for x in "qk"]


def test_old_bytes_break_the_first_link(found):
    _, record = found
    assert not record["stale"]["holds"]
    assert record["stale"]["difference"]["module"].startswith("model.layers.0.")


def test_a_fault_in_one_module_is_found_in_that_module(found):
    _, record = found
    assert record["fault"]["difference"]["module"] == "layers.1.q_norm"
    assert record["fault"]["difference"]["left"] != record["fault"]["difference"]["right"]
    assert record["fault"]["causes"] == []


def test_an_open_cause_breaks_the_chain_where_the_table_says(found):
    name, record = found
    for cause, link in record["open"].items():
        if not link["holds"]:
            assert link["difference"]["module"].rpartition(".")[2] in CAUSES[cause].links, cause
    certain = {"rms_norm", "qk_norm", "final_norm", "residual_add", "rotary"} | ({"router_gemm"} if name == "moe" else set())
    assert certain <= {cause for cause, link in record["open"].items() if not link["holds"]}


def difference():
    return Difference(module="layers.1.attention", row=3, column=7, left=0.5, right=0.25, unequal=2, elements=9, largest=0.25)


def test_the_command_prints_the_first_broken_link_and_exits_with_1(capsys):
    holds = Link(name="bytes", left="trainer", right="engine", modules=2, elements=4, difference=None)
    broken = Link(
        name="modules", left="trainer", right="engine", modules=5, elements=99, difference=difference(), causes=("attention",)
    )  # fmt: skip
    assert report([holds], level="bitwise", as_json=False) == 0
    assert "all links hold" in capsys.readouterr().out
    assert report([holds, broken], level="fast", as_json=False) == 1
    printed = capsys.readouterr().out
    for part in (
        "BREAKS  modules at layers.1.attention, row 3, column 7: trainer 0.5, engine 0.25",
        "attention",
        "first broken link: modules",
    ):
        assert part in printed
    assert report([holds, broken], level="fast", as_json=True) == 1
    record = json.loads(capsys.readouterr().out)
    assert (record["holds"], record["first_broken"]) == (False, "modules")
    assert record["links"][1]["difference"]["row"] == 3
    assert record["links"][1]["causes"] == ["attention"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["rollout.placement=server", "sync.transport=disk"], "rollout.placement to in_process"),
        (["model.max_position_embeddings=64", "rollout.max_model_len=64"], "max_position_embeddings is 64"),
    ],
)
def test_what_the_chain_cannot_run_is_refused(overrides, words):
    cfg = load_config(QUICKSTART, ["run.backend=cpu", *overrides])
    with pytest.raises(ConfigError, match=words):
        chain_config(cfg)


def test_a_mistake_is_one_sentence_and_exit_code_2(capsys):
    assert main(["align", "check", str(QUICKSTART), "--set", "numerics.alignment_overrides={attention: slow}"]) == 2
    assert "alignment_overrides.attention is 'slow'" in capsys.readouterr().err


def test_help_says_what_the_exit_codes_mean(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["align", "check", "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert all(part in text for part in ("--json", "--set", "--seed", "Exit code 0", "docs/alignment.md"))


def test_the_chain_names_are_the_documented_ones():
    text = (PROCESS.parents[2] / "docs" / "alignment.md").read_text()
    assert all(f"| {link} |" in text for link in LINKS)
    for name, cause in CAUSES.items():
        assert f"| `{name}` |" in text, name
        for choice in cause.choices.values():
            assert choice.trainer in text, (name, choice.trainer)
            assert choice.rollout in text, (name, choice.rollout)
    assert Chain.__doc__
