"""The command line in real processes: help, exit codes, one sentence for a mistake and never a traceback."""

import os
import signal
import subprocess
import sys
from functools import partial

import pytest
import yaml

from e2e_fp8.cli import main as cli
from e2e_fp8.config.load import load_config

COMMANDS = ("train", "eval", "export", "receipt", "report", "doctor", "config", "plan", "align", "study")


def run(*args: str, cwd=None) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "e2e_fp8.cli", *args], capture_output=True, text=True, timeout=60, cwd=cwd)


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("run: {steps: 2, name: tiny}\n")
    return path


def test_help_names_every_command_with_examples():
    result = run("--help")
    assert result.returncode == 0
    assert "e2e-fp8 train configs/quickstart.yaml" in result.stdout
    assert all(command in result.stdout for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command(command, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main([command, "--help"])
    assert caught.value.code == 0
    assert len(capsys.readouterr().out.splitlines()) > 5


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["train", "none.yaml"], "none.yaml does not exist"),
        (["train", "run.yaml", "--set", "run.step=3"], "did you mean run.steps"),
        (["train", "run.yaml", "--set", "model.hidden_size=200"], "use 128 or 256"),
        (["train", "run.yaml", "--set", "model.hf_path=nowhere"], "config.json does not exist"),
        (
            ["train", "run.yaml", "--resume", "--set", "training.parallel.context=2"],
            "not a multiple of tensor x context x pipeline = 2",
        ),
        (["eval", "none.yaml"], "none.yaml does not exist"),
        (["eval", "."], "not a run folder"),
        (["eval", "run.yaml", "--samples", "0"], "at least 1"),
        (["export", "nowhere", "--out", "out"], "not a run folder"),
        (["export", "run.yaml"], "--out"),
        (["report", "nowhere"], "not a run folder"),
        (["receipt", "verify", "nowhere", "3"], "not a run folder"),
        (["doctor", "--set", "run.steps=1"], "needs a CONFIG.yaml"),
        (["config", "run.yaml", "--set", "numerics.rollout_precision=bf16"], "rollout_precision to fp8"),
        (["fly"], "invalid choice"),
        ([], "required"),
    ],
)
def test_mistakes_exit_with_2_and_one_sentence(config_file, args, part):
    result = run(*args, cwd=config_file.parent)
    assert result.returncode == 2
    assert part in result.stderr
    assert "Traceback" not in result.stderr + result.stdout
    assert result.stdout == ""
    if result.stderr.startswith("e2e-fp8: "):
        assert len(result.stderr.splitlines()) == 1


def test_export_never_overwrites(config_file):
    folder = config_file.parent
    config_file.rename(folder / "config.yaml")
    result = run("export", ".", "--out", ".", cwd=folder)
    assert result.returncode == 2
    assert "nothing is overwritten" in result.stderr
    assert [p.name for p in folder.iterdir()] == ["config.yaml"]


def test_config_prints_what_it_parsed(config_file):
    result = run("config", str(config_file), "--set", "run.steps=9")
    assert result.returncode == 0
    printed = yaml.safe_load(result.stdout)
    assert printed == load_config(config_file, ["run.steps=9"]).model_dump(mode="json")


@pytest.mark.parametrize(("flags", "resume"), [([], False), (["--resume"], True), (["--resume", "--set", "run.resume=false"], True)])
def test_resume_flag_sets_the_field(config_file, flags, resume):
    args = cli.build_parser().parse_args(["train", str(config_file), *flags])
    assert cli.train_config(args).run.resume is resume


def test_interrupt_exits_with_130(tmp_path):
    """The process waits in the read of a named pipe, so the signal certainly arrives inside a command."""
    pipe = tmp_path / "run.yaml"
    os.mkfifo(pipe)
    command = [sys.executable, "-m", "e2e_fp8.cli", "config", str(pipe)]
    # a shell's background job ignores SIGINT, and so would its children
    reset = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=reset) as process:
        writer = os.open(pipe, os.O_WRONLY)  # returns once the process has opened the pipe for reading
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
        os.close(writer)
    assert process.returncode == 130
    assert "interrupted" in stderr
    assert "Traceback" not in stderr


def test_a_bug_keeps_its_traceback(config_file, monkeypatch):
    def broken(args):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(cli, "_config", broken)
    with pytest.raises(ZeroDivisionError):
        cli.main(["config", str(config_file)])
