"""Trainers of two ranks (NCCL, Transformer Engine): bytes against the slow reference, and the step of one rank.

Each rank has its own GPU where there are enough, see integration/gpus.py.
"""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "integration"))
from gpus import places
from rank_cases import MODEL, Case, start_apart, whole_weights
from test_loop_ranks import GRIDS as LOOP_GRIDS
from test_loop_ranks import check_bug, check_loop, torchrun
from test_ranks import CASES, SHARED, check_bytes, check_equal_log_probs, check_step, write_case
from test_ranks_to_engines import GRIDS, MAX_BYTES, WIDE, Served, address, case_config, check_server, check_transfer

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(500)]


def on_gpus(case: Case) -> Case:
    """Of ranks that divide a micro-batch's tokens the last has some only where it is longer than the padding that FP8 wants of each."""
    more = {"microbatches": [[129, 200, 5], [170, 150]]} if "context" in case.parallel else {}
    return replace(case, backend="cuda", more=case.more | more)


@pytest.mark.parametrize("name", ["dp2", "ep2", "pp2", "tp2", "cp2", "dense_tp2"])
def test_two_ranks(name, tmp_path):
    case = on_gpus(CASES[name])
    for job, out in ((case, tmp_path / "many"), (case.alone(), tmp_path / "one")):
        write_case(job, out)
        start_apart(job, out)
    check_bytes(case, tmp_path / "many")
    check_step(case, tmp_path / "many", tmp_path / "one")


@pytest.mark.parametrize("name", SHARED)
def test_shared_operators_give_every_rank_the_bits_of_one(name, tmp_path):
    case = on_gpus(SHARED[name])
    for job, out in ((case, tmp_path / "many"), (case.alone(), tmp_path / "one")):
        write_case(job, out)
        start_apart(job, out)
    check_equal_log_probs(case, tmp_path / "many", tmp_path / "one")
    check_bytes(case, tmp_path / "many")
    check_step(case, tmp_path / "many", tmp_path / "one")


@pytest.mark.parametrize("grid", LOOP_GRIDS)
def test_whole_loop(grid, tmp_path):
    """The server shares the first trainer rank's GPU, except where NCCL has to reach it from every rank."""
    straight = grid.startswith("straight")
    last = places(3 if straight else 2)[-1].gpu
    devices = f"rollout.server_devices='{last if straight else 0}'"
    start = torchrun if last else partial(torchrun, hosts=2)
    check_loop(start, tmp_path, grid, "run.backend=cuda", "run.threads=0", "rollout.kv_cache_gib=2", devices)


@pytest.mark.parametrize("broken", [0, 1])
def test_a_bug_on_one_rank_ends_the_other_in_its_collective(broken, tmp_path):
    """NCCL does not tell it."""
    check_bug(broken, tmp_path, "run.backend=cuda", "run.threads=0", "rollout.server_devices='0'")


@pytest.mark.parametrize("grid", ["tp2", "ep2", "pp2"])
def test_each_rank_sends_its_rectangles_straight_to_the_engine_ranks(grid, tmp_path):
    more = {"engines": 2, "max_bytes": MAX_BYTES}
    case = Case(**GRIDS[grid], model=WIDE, steps=1, rollout_tp=2, backend="cuda", more=more)
    write_case(case, tmp_path / "out")
    start_apart(case, tmp_path / "out", engines=2)
    check_transfer(case, tmp_path / "out")


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="vLLM wants two GPUs, and the trainer has two others")
@pytest.mark.parametrize("grid", ["tp2", "ep2", "pp2"])
@pytest.mark.parametrize("expert", [False, True])
def test_trainer_ranks_send_their_rows_into_a_server(grid, expert, tmp_path):
    model = {name: value for name, value in (MODEL | WIDE).items() if name not in ("architecture", "initializer_range")}
    cfg = case_config(device="cuda", tensor_parallel=2, expert_parallel=expert, **model)
    served = Served(cfg, tmp_path / "served", environ={"CUDA_VISIBLE_DEVICES": "2,3"})
    try:
        name, rollout = ("tp2ep" if expert else "tp2"), {"tensor_parallel": 2, "expert_parallel": expert}
        more = {"publish_ranks": [address(served) | {"name": name, "rollout": rollout, "versions": [1, 2]}]}
        case = Case(**GRIDS[grid], model=WIDE, steps=1, rollout_tp=2, backend="cuda", more=more)
        write_case(case, tmp_path / "out")
        start_apart(case, tmp_path / "out")
        check_server(name, served, case, whole_weights(case, tmp_path / "out"), 2)
    finally:
        served.process.close()
