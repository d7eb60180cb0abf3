"""One rank of a trainer, started by torchrun: trains a few steps and writes what it holds for the test to compare.

torchrun --nproc-per-node N rank_process.py CASE.json OUT
"""

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from e2e_fp8.config.root import Config
from e2e_fp8.errors import UserError
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
    """Everything this rank holds: codes or BF16 weights, scales, masters."""
    found = {}
    for name, tensor, scale_inv in engine.named_local_weights():
        found[name] = tensor.clone()
        if scale_inv is not None:
            found[name + "_scale_inv"] = scale_inv.clone()
    found.update({f"master/{name}": master.clone() for name, master in engine.named_masters()})
    return found


def main(case: dict, out: Path) -> None:
    cfg = Config.model_validate(case["config"])
    engine = MegatronEngine(cfg)
    rank = dist.get_rank()
    save_file(held(engine), out / f"start-{rank}.safetensors")
    batches = batches_of(case, cfg.model.vocab_size)
    denominator = float(sum(b.loss_mask.sum() for b in batches))
    mine = share_of(batches, engine.grid.place(rank).data, engine.grid.data)
    engine.set_learning_rate(case["learning_rate"])
    stats = {f"log_probs/{i}": s.log_probs for i, s in enumerate(engine.token_stats(mine))}
    reports = [engine.train_step(mine, nll, denominator) for _ in range(case["steps"])]
    save_file({**held(engine), **stats}, out / f"end-{rank}.safetensors")
    gathered = {entry.name: entry.tensor for entry in exported_tensors(engine, cfg)}
    if rank == 0:
        save_file(gathered, out / "gathered.safetensors")
    record = [{"loss": r.metrics["loss"], "entropy": r.metrics["entropy"], "grad_norm": r.grad_norm, "skipped": r.skipped} for r in reports]
    (out / f"reports-{rank}.json").write_text(json.dumps(record))
    factor = float("nan") if rank == dist.get_world_size() - 1 else 1.0
    report = engine.train_step(mine, lambda s, b: (nll(s, b)[0] * factor, {}), denominator)
    assert report.skipped, "a non-finite gradient on one rank must stop the step on all"
    dist.barrier()


if __name__ == "__main__":
    try:
        main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
    except UserError as error:
        print(f"refused: {error}", file=sys.stderr)
        sys.exit(2)
