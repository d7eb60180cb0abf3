"""Ranks of a trainer: each trains a few steps and writes what it holds for the test to compare.

    torchrun --nproc-per-node N rank_process.py OUT     one job, its case in OUT/case.json
    rank_process.py                                     one job for each line ``N PORT OUT`` on standard input

The second form imports Megatron once and forks the ranks of each job, because imports take longer than the jobs.
"""

import json
import os
import sys
import traceback
from pathlib import Path

os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from e2e_fp8.config.root import Config
from e2e_fp8.errors import UserError
from e2e_fp8.megatron_names import neutral_name
from e2e_fp8.orchestration.weight_sync import exported_tensors
from e2e_fp8.training.engine import MegatronEngine
from e2e_fp8.training.microbatches import share_of
from e2e_fp8.types import PackedBatch, TokenStats


def batches_of(case: dict, vocab: int) -> list[PackedBatch]:
    generator = torch.Generator().manual_seed(case["seed"])
    return [random_batch(lengths, vocab, generator) for lengths in case["microbatches"]]


def random_batch(lengths: list[int], vocab: int, generator: torch.Generator) -> PackedBatch:
    total = sum(lengths)
    tokens = torch.randint(0, vocab, (total,), generator=generator)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    mask, zeros = torch.ones(total), torch.zeros(total)
    mask[(cu_seqlens[1:] - 1).long()] = 0.0
    return PackedBatch(
        token_ids=tokens,
        position_ids=torch.cat([torch.arange(n) for n in lengths]),
        cu_seqlens=cu_seqlens,
        targets=tokens.roll(-1),
        loss_mask=mask,
        advantages=zeros,
        rollout_log_probs=zeros,
        old_log_probs=zeros,
    )


def nll(stats: TokenStats, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return -(stats.log_probs * batch.loss_mask).sum(), {"entropy": (stats.entropy * batch.loss_mask).sum().detach()}


def held(engine: MegatronEngine) -> dict[str, torch.Tensor]:
    """Everything this rank holds, by the local spec's names: codes or BF16 weights, scales, masters."""
    found = {}
    for name, tensor, scale_inv in engine.named_local_weights():
        found[neutral_name(name)] = tensor
        if scale_inv is not None:
            found[neutral_name(name) + "_scale_inv"] = scale_inv
    found.update({f"master/{neutral_name(name)}": master for name, master in engine.named_masters()})
    return {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in found.items()}


def main(case: dict, out: Path) -> None:
    cfg = Config.model_validate(case["config"])
    engine = MegatronEngine(cfg)
    rank = dist.get_rank()
    save_file(held(engine), out / f"start-{rank}.safetensors")
    batches = batches_of(case, cfg.model.vocab_size)
    denominator = float(sum(b.loss_mask.sum() for b in batches))
    mine = share_of(batches, engine.grid.place(rank).data, engine.grid.data)
    engine.set_learning_rate(case["learning_rate"])
    stats = {f"log_probs/{i}": s.log_probs.cpu() for i, s in enumerate(engine.token_stats(mine))} if case["steps"] else {}
    reports = [engine.train_step(mine, nll, denominator) for _ in range(case["steps"])]
    save_file({**held(engine), **stats}, out / f"end-{rank}.safetensors")
    gathered = {entry.name: entry.tensor.cpu() for entry in exported_tensors(engine, cfg)}
    if rank == 0:
        save_file(gathered, out / "gathered.safetensors")
    record = [{"loss": r.metrics["loss"], "entropy": r.metrics["entropy"], "grad_norm": r.grad_norm, "skipped": r.skipped} for r in reports]
    (out / f"reports-{rank}.json").write_text(json.dumps(record))
    if case["steps"]:
        check_poisoned_step(engine, mine, denominator)
    dist.barrier()


def check_poisoned_step(engine: MegatronEngine, mine: list[PackedBatch], denominator: float) -> None:
    """A non-finite gradient on one rank stops the step on all."""
    factor = float("nan") if dist.get_rank() == dist.get_world_size() - 1 else 1.0
    report = engine.train_step(mine, lambda s, b: (nll(s, b)[0] * factor, {}), denominator)
    assert report.skipped
    assert engine.policy_version > 0


def run_rank(out: Path) -> int:
    """Exit status of one rank: 2 and one sentence for what a user can act on."""
    try:
        main(json.loads((out / "case.json").read_text()), out)
    except UserError as error:
        (out / f"refused-{os.environ['RANK']}").write_text(str(error))
        return 2
    except BaseException:
        (out / f"failed-{os.environ['RANK']}").write_text(traceback.format_exc())
        return 1
    return 0


def fork_ranks(world: int, port: str, out: Path) -> list[int]:
    """Exit statuses of all ranks of one job."""
    children = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
            os._exit(run_rank(out))
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(run_rank(Path(sys.argv[1])))
    for line in sys.stdin:
        world, port, out = line.rstrip("\n").split(" ", 2)
        print(json.dumps(fork_ranks(int(world), port, Path(out))), flush=True)
