"""Trainers of two ranks on two GPUs (NCCL, Transformer Engine): bytes against the slow reference, and the step of one rank."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "integration"))
from test_ranks import CASES, check_bytes, check_step, run_torchrun, write_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.mark.parametrize("name", ["dp2", "ep2", "pp2", "tp2", "dense_tp2"])
def test_two_gpus(name, tmp_path):
    case = replace(CASES[name], backend="cuda")
    for job, out in ((case, tmp_path / "many"), (case.alone(), tmp_path / "one")):
        write_case(job, out)
        run_torchrun(job, out)
    check_bytes(case, tmp_path / "many")
    check_step(case, tmp_path / "many", tmp_path / "one")
