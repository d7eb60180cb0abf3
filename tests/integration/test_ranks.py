"""Trainers of several real processes: what each rank holds, how it trains, and the whole tensors put together from all of them.

Bytes are compared with an independent slow reference that gathers everything and cuts by rows. A one-rank trainer with the same
weights and batches says what the update should have been.
"""

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from rank_cases import SCRIPT, Case, bits, free_port, held, masters, model_of, quantized, rank_environment, write_case
from references import sharding_reference
from safetensors.torch import load_file
from tolerances import RANKS_GRAD_NORM, RANKS_LOG_PROBS, RANKS_LOSS, RANKS_UPDATE

from e2e_fp8.config.root import Config
from e2e_fp8.sync.receipt import manifest_of
from e2e_fp8.training.weights import initial_hf_weights
from e2e_fp8.types import ExportedTensor

DENSE = {"architecture": "qwen3"}
CASES = {
    "tp2": Case(world=2, parallel={"tensor": 2}),
    "ep2": Case(world=2, parallel={"expert": 2}),
    "pp2": Case(world=2, parallel={"pipeline": 2}),
    "tp2ep2": Case(world=4, parallel={"tensor": 2, "expert": 2}),
    "dp2": Case(world=2),
    "cp2": Case(world=2, parallel={"context": 2}),
    "bf16_cp2": Case(world=2, parallel={"context": 2}, precision="bf16", model=DENSE),
    "tp2cp2": Case(world=4, parallel={"tensor": 2, "context": 2}),
    "cp2ep2": Case(world=4, parallel={"context": 2, "expert": 2}),
    "dense_tp2": Case(world=2, parallel={"tensor": 2}, model=DENSE),
    "bf16_tp2": Case(world=2, parallel={"tensor": 2}, precision="bf16"),
    "bf16_ep2": Case(world=2, parallel={"expert": 2}, precision="bf16"),
    "etp2": Case(world=2, parallel={"tensor": 2, "expert_tensor": 2}, model={"moe_intermediate_size": 256}),
    "vpp2": Case(world=2, parallel={"pipeline": 2, "virtual_pipeline": 2}, model={"num_hidden_layers": 4}, steps=0),
}
SHARED = {name: replace(CASES[name], alignment="bitwise") for name in ("dp2", "ep2", "pp2", "cp2")}
"""With every operator that the engine shares."""


SLOW = ("tp2cp2", "cp2ep2")


def marked(names: Iterable[str]) -> list:
    """The names as parameters of a test; four processes beside the others are slow."""
    return [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in names]


def run_torchrun(case: Case, out: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(case.world)]
    torchrun += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    done = subprocess.run([*torchrun, str(SCRIPT), str(out)], capture_output=True, text=True, timeout=300, env=rank_environment())
    messages = [f.read_text() for pattern in ("failed-*", "refused-*") for f in out.glob(pattern)]
    assert done.returncode == 0, "\n".join(messages) or done.stderr[-3000:]


@pytest.mark.parametrize("name", marked(CASES))
def test_every_rank_starts_with_its_share_of_the_weights(name, results):
    case = CASES[name]
    cfg = Config.model_validate(case.config)
    whole = {n: bits(t) for n, t in initial_hf_weights(cfg.model, cfg.run.seed).items()}
    places = sharding_reference.coordinates(case.world, case.parallel)
    for place, found in zip(places, masters(held(results(case), case.world, "start")), strict=True):
        rows_of = sharding_reference.rank_rows(model_of(case), case.parallel, place)
        assert rows_of.keys() == found.keys()
        for parameter, rows in rows_of.items():
            expected = sharding_reference.cut(whole, rows)
            assert np.array_equal(found[parameter].reshape(expected.shape), expected), (place, parameter)


@pytest.mark.parametrize("name", marked(CASES))
def test_bytes_of_every_rank_and_the_gathered_tensors_are_those_of_the_whole_model(name, results):
    check_bytes(CASES[name], results(CASES[name]))


def check_bytes(case: Case, folder: Path) -> None:
    found = held(folder, case.world, "end")
    whole = sharding_reference.gather(masters(found), model_of(case), case.parallel)
    codes, scales, high = quantized(whole, case)
    exported = load_file(folder / "gathered.safetensors")
    assert exported.keys() == codes.keys() | high.keys() | {n + "_scale_inv" for n in scales}
    for tensor, values in exported.items():
        expected = scales.get(tensor.removesuffix("_scale_inv")) if tensor.endswith("_scale_inv") else {**codes, **high}[tensor]
        assert np.array_equal(bits(values).reshape(expected.shape), expected), tensor
    places = sharding_reference.coordinates(case.world, case.parallel)
    for place, rank in zip(places, found, strict=True):
        for parameter, rows in sharding_reference.rank_rows(model_of(case), case.parallel, place).items():
            expected = sharding_reference.cut(codes if rows[0][0] in codes else high, rows)
            assert np.array_equal(bits(rank[parameter]).reshape(expected.shape), expected), (place, parameter)
            assert (parameter + "_scale_inv" in rank) == (rows[0][0] in codes)
            if rows[0][0] in codes:
                assert np.array_equal(bits(rank[parameter + "_scale_inv"]), sharding_reference.cut_scales(scales, rows)), parameter


TRAINED = [name for name, case in CASES.items() if case.steps]


@pytest.mark.parametrize("name", marked(TRAINED))
def test_a_step_on_several_ranks_is_the_step_of_one(name, results):
    case = CASES[name]
    check_step(case, results(case), results(case.alone()))


def check_step(case: Case, many: Path, one: Path) -> None:
    reports = [json.loads((many / f"reports-{rank}.json").read_text()) for rank in range(case.world)]
    assert all(report == reports[0] for report in reports), "all ranks report the same"
    expected = json.loads((one / "reports-0.json").read_text())
    for ours, theirs in zip(reports[0], expected, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=RANKS_LOSS[case.precision])
        assert ours["entropy"] == pytest.approx(theirs["entropy"], rel=RANKS_LOSS[case.precision])
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=RANKS_GRAD_NORM[case.precision])
    first, last = flat(one, 1, "start", case), flat(one, 1, "end", case)
    ours = flat(many, case.world, "end", case, case.parallel)
    assert np.linalg.norm(ours - last) <= RANKS_UPDATE[case.precision] * np.linalg.norm(last - first)


def flat(folder: Path, world: int, when: str, case: Case, parallel: dict | None = None) -> np.ndarray:
    whole = sharding_reference.gather(masters(held(folder, world, when)), model_of(case), parallel or {})
    return np.concatenate([whole[name].view(np.float32).ravel() for name in sorted(whole)]).astype(np.float64)


@pytest.mark.parametrize("name", marked(TRAINED))
def test_log_probs_of_every_data_parallel_rank(name, results):
    case = CASES[name]
    expected = held(results(case.alone()), 1, "end")[0]
    places = sharding_reference.coordinates(case.world, case.parallel)
    data = max(place["data"] for place in places) + 1
    for place, found in zip(places, held(results(case), case.world, "end"), strict=True):
        mine = [expected[f"log_probs/{index}"] for index in range(2)][place["data"] :: data]
        for index, log_probs in enumerate(mine):
            difference = (found[f"log_probs/{index}"] - log_probs).abs()
            assert difference.mean() <= RANKS_LOG_PROBS[case.precision], (place, float(difference.mean()))


@pytest.mark.parametrize("name", ["dp2", "ep2", "pp2", "bf16_ep2"])
def test_without_tensor_parallelism_log_probs_are_bit_equal(name, results):
    case = CASES[name]
    check_equal_log_probs(case, results(case), results(case.alone()))


@pytest.mark.parametrize("name", ["ep2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dp2", "pp2", "cp2"))])
def test_shared_operators_give_every_rank_the_bits_of_one(name, results):
    """And steps as near to one rank's as with native operators. One rank's log-probs are vLLM's: test_alignment.py."""
    case = SHARED[name]
    many, one = results(case), results(case.alone())
    check_equal_log_probs(case, many, one)
    check_step(case, many, one)
    native = held(results(CASES[name].alone()), 1, "end")[0]
    assert not torch.equal(held(one, 1, "end")[0]["log_probs/0"], native["log_probs/0"]), "nothing was shared"


def check_equal_log_probs(case: Case, many: Path, one: Path) -> None:
    expected = held(one, 1, "end")[0]
    places = sharding_reference.coordinates(case.world, case.parallel)
    data = max(place["data"] for place in places) + 1
    for place, found in zip(places, held(many, case.world, "end"), strict=True):
        for index, batch in enumerate(range(2)[place["data"] :: data]):
            assert torch.equal(found[f"log_probs/{index}"], expected[f"log_probs/{batch}"])


@pytest.mark.parametrize("name", ["dp2", "pp2"])
def test_data_and_pipeline_parallel_steps_are_bit_equal(name, results):
    case = CASES[name]
    many, one = results(case), results(case.alone())
    assert np.array_equal(flat(many, case.world, "end", case, case.parallel), flat(one, 1, "end", case))


@pytest.mark.slow
def test_engine_holds_the_bytes_of_a_trainer_of_four_ranks(results, tmp_path):
    case = CASES["tp2ep2"]
    folder = results(case)
    for name in ("case.json", "gathered.safetensors"):
        shutil.copy(folder / name, tmp_path / name)
    words = [sys.executable, str(Path(__file__).with_name("rank_engine_process.py")), str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, env=rank_environment())
    assert done.returncode == 0, done.stderr[-4000:]
    record = json.loads((tmp_path / "engine.json").read_text())
    whole = sharding_reference.gather(masters(held(folder, case.world, "end")), model_of(case), case.parallel)
    codes, scales, _ = quantized(whole, case)
    entries = [ExportedTensor(name=n, tensor=torch.from_numpy(c).view(torch.float8_e4m3fn)) for n, c in codes.items()]
    entries += [ExportedTensor(name=n + "_scale_inv", tensor=torch.from_numpy(x).view(torch.float32)) for n, x in scales.items()]
    assert record["live"] == record["delivered"] == manifest_of(entries).combined
    assert record["tokens"]


@pytest.mark.slow
def test_torchrun_starts_the_same_job(results, tmp_path):
    case, out = CASES["tp2"], tmp_path / "out"
    write_case(case, out)
    run_torchrun(case, out)
    for left, right in zip(held(out, case.world, "end"), held(results(case), case.world, "end"), strict=True):
        assert left.keys() == right.keys()
        assert all(np.array_equal(bits(left[name]), bits(right[name])) for name in left)


REFUSALS = {
    "world": (
        Case(world=2, parallel={"pipeline": 2, "tensor": 2}),
        ["2 ranks", "tensor x context x pipeline = 4", "training.parallel.tensor 2"],
    ),
    "tiles": (
        Case(world=2, parallel={"tensor": 2, "expert_tensor": 2}),
        ["w13_weight: mlp.experts.0.gate_proj.weight at rows 64", "training.parallel.expert_tensor=1 rollout.tensor_parallel=1"],
    ),
    "interleaved": (
        Case(world=2, parallel={"pipeline": 2, "virtual_pipeline": 2}, model={"num_hidden_layers": 4}),
        ["virtual_pipeline is 2", "schedule"],
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_run_is_refused_on_every_rank(name, run_job):
    case, parts = REFUSALS[name]
    statuses, out = run_job(case)
    assert statuses == [2] * case.world
    for rank in range(case.world):
        message = (out / f"refused-{rank}").read_text()
        assert all(part in message for part in parts), message


class Nonsense(BaseHTTPRequestHandler):
    """A server whose two engine ranks say nothing of themselves."""

    def do_POST(self) -> None:
        content = json.dumps({"results": [{}, {}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


def test_a_bug_while_rank_0_talks_to_the_server_is_an_error_on_every_rank(run_job, tmp_path):
    (tmp_path / "token").write_text("0123456789abcdef")
    with ThreadingHTTPServer(("127.0.0.1", 0), Nonsense) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        to = {"name": "none", "url": f"http://127.0.0.1:{server.server_port}", "token_file": str(tmp_path / "token")}
        more = {"gather": False, "publish_ranks": [to | {"rollout": {}, "versions": []}]}
        statuses, out = run_job(Case(world=2, steps=0, model=DENSE, rollout_tp=2, transport="ranks", more=more))
        server.shutdown()
    assert statuses == [1, 2]
    assert "KeyError: 'nccl_device'" in (out / "failed-0").read_text()
    assert (out / "refused-1").read_text().startswith("Rank 0 of the trainer failed in a weight sync with KeyError: 'nccl_device'")
