"""One object on rank 0 that drives the trainer on all ranks, in real processes over gloo, without an engine.

A trainer of one rank with the same micro-batches says what has to come out; the loop itself is in test_loop_ranks.py.
"""

import json
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from drive_ranks import HEAVY_MIB
from rank_cases import Case
from safetensors.torch import load_file
from tiny_runs import assert_same_state
from tolerances import RANKS_GRAD_NORM, RANKS_LOSS, RANKS_UPDATE

from e2e_fp8.orchestration.checkpoint import CheckpointStore

GRIDS = {
    "dp2": {"world": 2},
    "tp2": {"world": 2, "parallel": {"tensor": 2}},
    "pp2": {"world": 2, "parallel": {"pipeline": 2}},
    "ep2": {"world": 2, "parallel": {"expert": 2}},
    "cp2": {"world": 2, "parallel": {"context": 2}},
}
LIFE = [["stats"], ["train", 1], ["save", 1], ["train", 1], ["save", 2], ["whole", "end"], ["reference"]]


CRITIC = [["stats"], ["train", 1], ["critic", 2], ["save", 1], ["critic", 1], ["save", 2], ["whole", "end"]]


def case_of(grid: str | None, *drive: list) -> Case:
    return Case(**(GRIDS[grid] if grid else {"world": 1}), more={"drive": list(drive)})


def same_bytes(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    assert left.keys() == right.keys()
    return all(torch.equal(left[n].contiguous().view(torch.uint8), right[n].contiguous().view(torch.uint8)) for n in left)


def masters(folder: Path, name: str = "end") -> dict[str, torch.Tensor]:
    return {n: t for n, t in load_file(folder / f"{name}.safetensors").items() if n.startswith("master/")}


@pytest.mark.parametrize("grid", ["dp2", "pp2"])
def test_what_rank_0_gets_is_what_one_rank_computes(grid, results):
    many, one = results(case_of(grid, *LIFE)), results(case_of(None, *LIFE))
    for name in ("log_probs", "reference", "end"):
        assert same_bytes(load_file(many / f"{name}.safetensors"), load_file(one / f"{name}.safetensors")), name
    for ours, theirs in zip(*(json.loads((folder / "reports.json").read_text()) for folder in (many, one)), strict=True):
        # sums of floats in another order
        assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize("grid", ["tp2", "ep2", "cp2"])
def test_divided_models_step_as_one_rank_within_rounding(grid, results):
    many, one = results(case_of(grid, *LIFE)), results(case_of(None, *LIFE))
    start = results(case_of(None, ["save", 0], ["whole", "end"]))
    ours, theirs, before = (torch.cat([t.flatten() for _, t in sorted(masters(folder).items())]) for folder in (many, one, start))
    assert (ours - theirs).norm() <= RANKS_UPDATE["fp8"] * (theirs - before).norm()


@pytest.mark.parametrize("grid", GRIDS)
def test_a_resumed_trainer_ends_with_the_same_bytes(grid, results):
    straight = results(case_of(grid, *LIFE))
    # the log-probs come first: those of the starting weights were the old ones there
    resumed = results(case_of(grid, ["stats"], ["warm"], ["resume", str(straight), 1], ["train", 1], ["save", 2], ["whole", "end"]))
    assert same_bytes(load_file(resumed / "end.safetensors"), load_file(straight / "end.safetensors"))
    for rank in range(2):
        left, right = (CheckpointStore(folder / "checkpoints", keep=9).load(2, rank=rank) for folder in (resumed, straight))
        assert_same_state(left, right, f"rank {rank}")


AGGREGATED = {
    "token-mean": {"kind": "dapo", "loss_agg_mode": "token-mean"},
    "seq-mean-token-mean": {"kind": "gspo", "loss_agg_mode": "seq-mean-token-mean"},
    "seq-mean-token-sum": {"kind": "gspo_token", "loss_agg_mode": "seq-mean-token-sum"},
    "seq-mean-token-sum-norm": {"kind": "dr_grpo", "loss_agg_mode": "seq-mean-token-sum-norm"},
}


@pytest.mark.parametrize("grid", ["dp2", "cp2"])
@pytest.mark.parametrize("mode", [pytest.param(mode, marks=[] if "-mean-token-mean" in mode else pytest.mark.slow) for mode in AGGREGATED])
def test_loss_and_step_do_not_depend_on_who_has_which_tokens(mode, grid, results):
    """Whole sequences on other ranks, or parts of one: every loss, its denominator and its gradient are those of one rank."""

    def job(grid: str | None) -> Path:
        return results(
            replace(case_of(grid, ["stats"], ["train", 2], ["save", 2], ["whole", "end"]), precision="bf16", objective=AGGREGATED[mode])
        )

    many, one = job(grid), job(None)
    reports, expected = (json.loads((folder / "reports.json").read_text()) for folder in (many, one))
    # ratios are 1, so nothing but weights and denominator is in the first loss; the second is of weights that rounding moved
    assert reports[0]["loss"] == expected[0]["loss"]
    moved = abs(expected[1]["loss"] - expected[0]["loss"])
    assert reports[1]["loss"] == pytest.approx(expected[1]["loss"], abs=RANKS_LOSS["bf16"] * moved)
    for ours, theirs in zip(reports, expected, strict=True):
        assert ours["tokens/trained"] == theirs["tokens/trained"]
        assert ours["ratio/mean"] == pytest.approx(theirs["ratio/mean"], rel=RANKS_LOSS["bf16"])
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=RANKS_GRAD_NORM["bf16"])
    before = results(replace(case_of(None, ["save", 0], ["whole", "end"]), precision="bf16"))
    ours, theirs, start = (torch.cat([t.flatten() for _, t in sorted(masters(folder).items())]) for folder in (many, one, before))
    assert (ours - theirs).norm() <= RANKS_UPDATE["bf16"] * (theirs - start).norm()


def test_memory_is_that_of_every_rank(results):
    """And asking for it needs nothing of the others but to follow."""
    found = json.loads((results(case_of("dp2", ["weigh", 1], ["stats"])) / "memory.json").read_text())
    light, heavy = found["ranks"]
    # two forks of one process, but for what one of them holds
    assert heavy - light == pytest.approx(HEAVY_MIB / 1024, abs=0.1)
    assert found["record"]["memory/trainer_imbalance"] == pytest.approx(2 * heavy / (light + heavy), rel=0.02)


@pytest.mark.parametrize("grid", GRIDS)
def test_one_process_reads_the_weights_of_all_shares(grid, results):
    many = results(case_of(grid, *LIFE))
    alone = results(case_of(None, ["weights", str(many)], ["save", 1], ["whole", "end"]))
    assert same_bytes(load_file(alone / "end.safetensors"), load_file(many / "end.safetensors"))


def critic_of(folder: Path) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    return load_file(folder / "critic.safetensors"), json.loads((folder / "critic.json").read_text())


@pytest.mark.parametrize("grid", ["dp2", "pp2"])
def test_the_critic_that_rank_0_drives_is_that_of_one_rank(grid, results):
    """Values bit for bit, before and after its steps; it started from the policy as trained, and left that as it was."""
    many, one = results(case_of(grid, *CRITIC)), results(case_of(None, *CRITIC))
    (values, reports), (expected, theirs) = critic_of(many), critic_of(one)
    assert same_bytes(values, expected)
    assert not torch.equal(values["before/0"], values["after/0"])
    assert len(reports) == 3
    for ours, single in zip(reports, theirs, strict=True):
        # sums of floats in another order
        assert ours == pytest.approx(single, rel=1e-5)
        assert ours["critic/grad_norm"] > 0
    assert reports[0]["critic/vf_clipfrac"] > 0
    assert same_bytes(load_file(many / "end.safetensors"), load_file(one / "end.safetensors"))


@pytest.mark.parametrize("grid", ["tp2", "ep2", "cp2"])
def test_a_divided_critic_is_that_of_one_rank_within_rounding(grid, results):
    (values, reports), (expected, theirs) = critic_of(results(case_of(grid, *CRITIC))), critic_of(results(case_of(None, *CRITIC)))
    ours, single = (torch.cat([found[name] for name in ("after/0", "after/1")]) for found in (values, expected))
    assert (ours - single).norm() <= RANKS_UPDATE["fp8"] * single.norm()
    for found, known in zip(reports, theirs, strict=True):
        assert found["critic/vf_loss"] == pytest.approx(known["critic/vf_loss"], rel=RANKS_UPDATE["fp8"])


@pytest.mark.parametrize("grid", GRIDS)
def test_a_resumed_critic_ends_with_the_same_bytes(grid, results):
    straight = results(case_of(grid, *CRITIC))
    resumed = results(case_of(grid, ["warm"], ["resume", str(straight), 1], ["critic", 1], ["save", 2]))
    for name, tensor in critic_of(resumed)[0].items():
        assert torch.equal(tensor, critic_of(straight)[0][name]), name
    for rank in range(2):
        left, right = (CheckpointStore(folder / "checkpoints", keep=9).load(2, rank=rank) for folder in (resumed, straight))
        assert "critic" in left
        assert_same_state(left, right, f"rank {rank}")


def test_a_bf16_reference_beside_an_fp8_trainer_is_that_of_one_rank(results):
    cases = [
        Case(**size, objective={"kl_coef": 0.1, "reference_precision": "bf16"}, more={"drive": [["stats"], ["reference"]]})
        for size in (GRIDS["dp2"], {"world": 1})
    ]
    many, one = ([load_file(results(case) / f"{name}.safetensors") for name in ("log_probs", "reference")] for case in cases)
    assert same_bytes(many[0], one[0])
    assert same_bytes(many[1], one[1])
    assert not torch.equal(many[1]["log_probs/0"], many[0]["log_probs/0"])


def test_other_ranks_may_not_resume(results, run_job):
    straight = results(case_of("tp2", *LIFE))
    statuses, out = run_job(case_of("dp2", ["resume", str(straight), 1]))
    assert statuses == [2, 2]
    assert "was written by 2 ranks (tensor 2), but this job has 2 ranks: " in (out / "refused-0").read_text()


def refusals(out: Path) -> list[str]:
    assert not list(out.glob("failed-*")), [f.read_text() for f in out.glob("failed-*")]
    return [f.read_text() for f in sorted(out.glob("refused-*"))]


def test_a_killed_rank_is_one_sentence_on_the_others(run_job):
    case = replace(case_of("dp2", ["save", 1], ["die", 1], ["train", 1]), world=3)
    statuses, out = run_job(case)
    assert statuses == [2, -signal.SIGKILL, 2]
    assert all("Rank 1 of the trainer is gone: its process ended without a word" in text for text in refusals(out))
    assert CheckpointStore(out / "checkpoints", keep=9).latest() == 1


def sentences(out: Path) -> list[str]:
    """What all ranks told the user."""
    return [line for file in out.glob("stderr-*") for line in file.read_text().splitlines() if line.startswith("e2e-fp8: ")]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("broken", [0, 1])
def test_a_bug_on_one_rank_ends_others_that_wait_elsewhere(broken, run_job):
    """As in a collective over NCCL, which the end of a rank does not interrupt: two ranks wait for each other."""
    waiting = [rank for rank in range(3) if rank != broken]
    statuses, out = run_job(replace(case_of("dp2", ["bug", broken], ["cross", *waiting], ["train", 1]), world=3))
    assert statuses == [1 if rank == broken else 2 for rank in range(3)]
    (said,) = sentences(out)
    assert f"Rank {broken} of the trainer failed with KeyError: 'nothing of this name' (traceback in its own output)" in said
    assert 'return {}["nothing of this name"]' in (out / f"stderr-{broken}").read_text()
    assert (out / "last_wish").exists() == (broken == 1)


@pytest.mark.timeout(120)
def test_a_killed_rank_is_named_by_rank_0_that_waits_for_another(run_job):
    statuses, out = run_job(replace(case_of("dp2", ["die", 1], ["cross", 0, 2], ["train", 1]), world=3))
    assert statuses == [2, -signal.SIGKILL, 2]
    (said,) = sentences(out)
    assert said.startswith("e2e-fp8: Rank 1 of the trainer is gone: its process ended without a word")
    assert (out / "last_wish").exists()


def test_rank_0_killed_before_the_commit_leaves_the_checkpoint_before(run_job):
    statuses, out = run_job(case_of("dp2", ["save", 1], ["train", 1], ["die_before_commit", 2]))
    assert statuses == [-signal.SIGKILL, 2]
    assert ["Rank 0 of the trainer is gone" in text for text in refusals(out)] == [True]
    store = CheckpointStore(out / "checkpoints", keep=9)
    assert store.latest() == 1
    assert store.load(1, rank=1)["policy"]["policy_version"] == 0


def test_a_share_that_cannot_be_written_undoes_the_checkpoint_and_the_run_goes_on(run_job):
    statuses, out = run_job(case_of("dp2", ["full_disk", 1], ["save", 1], ["train", 1]))
    assert statuses == [0, 0], refusals(out)
    assert "Rank 1: the share of a checkpoint" in (out / "not_saved").read_text()
    assert "the file size limit is reached" in (out / "not_saved").read_text()
    assert not list((out / "checkpoints").iterdir())
    assert len(json.loads((out / "reports.json").read_text())) == 1


def test_a_damaged_share_is_refused(results, run_job):
    straight = results(case_of("dp2", ["train", 1], ["save", 1]))
    (victim,) = (straight / "checkpoints").glob("*/rank_00001.tensors-*")
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(bytes(data))
    statuses, out = run_job(case_of("dp2", ["resume", str(straight), 1]))
    assert statuses[0] == 2
    assert "Rank 1: Checkpoint of step 1 cannot be loaded" in (out / "refused-0").read_text()


def test_replicas_that_have_come_apart_are_found_before_a_sync(run_job):
    statuses, out = run_job(case_of("dp2", ["save", 1], ["tear", 1], ["whole", "end"]))
    assert statuses[0] == 2
    sentence = (out / "refused-0").read_text()
    assert "do not hold the bytes that were gathered from them (rank 1: " in sentence
    assert sentence.count("rank 1: ") == 1
