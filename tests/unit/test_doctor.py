"""The doctor on this machine, and its verdicts for environments that contradict the configuration."""

import importlib.metadata
import platform
import subprocess
import sys

import pytest

from e2e_fp8.config.load import parse_config
from e2e_fp8.doctor import PINS, diagnose, installed_version
from e2e_fp8.doctor_switches import EFFECTS, required_values


def by_name(diagnosis) -> dict:
    return {switch.name: switch for switch in diagnosis.switches}


def test_reports_this_machine():
    checks = {check.name: check for check in diagnose(None, {}).checks}
    assert checks["python"].found == platform.python_version()
    assert checks["torch"].found == importlib.metadata.version("torch").partition("+")[0]
    for pin in PINS:
        check = checks[" / ".join(pin.packages)]
        found = installed_version(pin.packages[0])
        assert check.status == ("fail" if found is None else "ok" if found == pin.version else "warn")
        assert check.blocks == (() if found else pin.needed_by)


def test_exit_code_follows_the_verdicts():
    result = subprocess.run([sys.executable, "-m", "e2e_fp8.cli", "doctor"], capture_output=True, text=True, timeout=60)
    verdicts = dict(line.split(": ", 1) for line in result.stdout.splitlines()[-2:])
    assert set(verdicts) == {"cpu", "cuda"}
    assert result.returncode == (0 if any(v == "can run" for v in verdicts.values()) else 1)
    for verdict in verdicts.values():
        assert verdict == "can run" or (verdict.startswith("cannot run, because ") and "; do: " in verdict)


def test_no_ground_without_memory_or_disk(monkeypatch):
    import e2e_fp8.doctor as doctor

    monkeypatch.setattr(doctor, "MIN_MEMORY_GIB", 1e9)
    diagnosis = diagnose(None, {})
    assert not diagnosis.can_run
    assert "memory available" in diagnosis.verdicts["cpu"]
    assert "memory available" in diagnosis.verdicts["cuda"]


def test_unset_switches_block_nothing():
    for switch in diagnose(None, {}).switches:
        assert switch.value == "unset"
        assert not switch.blocks


@pytest.mark.parametrize("scale_format", ["fp32", "pow2"])
def test_scale_switch_is_judged_against_the_config(scale_format):
    cfg = parse_config({"numerics": {"scale_format": scale_format}})
    right, wrong = ("1", "0") if scale_format == "fp32" else ("0", "1")
    name = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"
    assert not by_name(diagnose(cfg, {name: right}))[name].blocks
    switch = by_name(diagnose(cfg, {name: wrong}))[name]
    assert switch.blocks == ("cuda",)
    assert right in switch.status


@pytest.mark.parametrize(
    ("name", "value", "blocked"),
    [
        ("VLLM_USE_DEEP_GEMM_E8M0", "1", ("cuda",)),
        ("VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER", "1", ("cuda",)),
        ("VLLM_USE_FLASHINFER_SAMPLER", "1", ("cuda",)),
        ("VLLM_USE_DEEP_GEMM", "0", ("cuda",)),
        ("VLLM_USE_DEEP_GEMM", "1", ()),
        ("NVTE_BACKWARD_OVERRIDE", "high_precision", ("cuda",)),
        ("NVIDIA_TF32_OVERRIDE", "1", ("cuda",)),
        ("NVIDIA_TF32_OVERRIDE", "0", ()),
        ("TORCH_COMPILE_DISABLE", "0", ("cpu",)),
        ("VLLM_ENABLE_V1_MULTIPROCESSING", "1", ("cpu", "cuda")),
        ("VLLM_CPU_KVCACHE_SPACE", "99", ("cpu",)),
        ("CUBLAS_WORKSPACE_CONFIG", ":4096:8", ()),
    ],
)
def test_contradicting_values_stop_the_ground_that_reads_them(name, value, blocked):
    diagnosis = diagnose(None, {name: value})
    assert by_name(diagnosis)[name].blocks == blocked
    for ground in blocked:
        assert f"{name}={value}" in diagnosis.verdicts[ground]
        assert f"unset {name}" in diagnosis.verdicts[ground]


@pytest.mark.parametrize("ground", ["cpu", "cuda"])
def test_every_value_a_run_sets_is_explained(ground):
    assert set(required_values(None, ground)) <= set(EFFECTS)


def test_values_a_run_sets_are_accepted():
    environ = required_values(None, "cpu") | required_values(None, "cuda")
    assert not any(switch.blocks for switch in diagnose(None, environ).switches)
