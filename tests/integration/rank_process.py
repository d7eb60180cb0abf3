"""Ranks of a trainer: each trains a few steps and writes what it holds for the test to compare.

    torchrun --nproc-per-node N rank_process.py OUT     one job, its case in OUT/case.json
    rank_process.py                                     one job for each line ``N PORT OUT`` on standard input

The second form imports Megatron once and forks the ranks of each job, because imports take longer than the jobs. A case may ask
for more: ``gather: false``, no whole tensors at all; ``publish``, a list of servers (``url``, ``token_file``, ``policy_version``) to
which rank 0 delivers the gathered tensors; ``publish_ranks``, servers into which every rank sends its own rows; ``engines``, the
number of engine ranks that are forked beside the trainer's, to which each rank sends its own rectangles in messages of
``max_bytes``; ``victim``, the rank that is killed after two of them; ``drive``, see drive_ranks.py; ``critic``, a value model that
starts from the trainer's weights and is trained beside it; ``replay``, a mode of router replay: each token's routing is then random,
and what every router used is written.
"""

import itertools
import json
import math
import os
import signal
import sys
import traceback
from dataclasses import asdict, replace
from pathlib import Path

os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from integration.notes import await_note, leave_note
from training_cases import nll, random_batch

from e2e_fp8.config.critic import CriticConfig
from e2e_fp8.config.hf import to_hf_config
from e2e_fp8.config.root import Config
from e2e_fp8.errors import UserError
from e2e_fp8.export.chunks import by_chunk
from e2e_fp8.layout import engine_shards
from e2e_fp8.layout.engine import scale_name
from e2e_fp8.layout.plan import Plan
from e2e_fp8.megatron_names import neutral_name
from e2e_fp8.numerics.quantization_plan import QuantizationPlan
from e2e_fp8.orchestration.weight_sync import exported_tensors, rank_publisher
from e2e_fp8.sync.control import UpdateControl
from e2e_fp8.sync.point_to_point import receive, send, transfer_plan
from e2e_fp8.sync.process_group import PairGroup
from e2e_fp8.sync.publisher import WeightPublisher
from e2e_fp8.training.engine import MegatronEngine
from e2e_fp8.training.microbatches import share_of
from e2e_fp8.training.value_engine import ValueEngine
from e2e_fp8.types import ExportedTensor, PackedBatch
from e2e_fp8.update.value import make_value_loss_fn


def batches_of(case: dict, cfg: Config) -> list[PackedBatch]:
    generator = torch.Generator().manual_seed(case["seed"])
    batches = [random_batch(lengths, generator, cfg.model.vocab_size) for lengths in case["microbatches"]]
    return [with_routing(batch, cfg, generator) for batch in batches] if "replay" in case else batches


def with_routing(batch: PackedBatch, cfg: Config, generator: torch.Generator) -> PackedBatch:
    """Random routing, of which one token in eight is not covered in one layer or another."""
    shape = (len(batch.token_ids), cfg.model.num_hidden_layers, cfg.model.num_experts)
    ids = torch.rand(shape, generator=generator).argsort(dim=2)[:, :, : cfg.model.num_experts_per_tok].int()
    weights = torch.rand(ids.shape, generator=generator) + 0.1
    mask = torch.rand(shape[:2], generator=generator) > 1 / 16
    given = weights / weights.sum(dim=2, keepdim=True) if cfg.training.router_replay.needs_gate_weights else None
    return replace(batch, routed_experts=ids, routed_weights=given, replay_mask=mask)


def watch_routers(engine: MegatronEngine) -> dict[str, torch.Tensor]:
    """Routing map and gate weights of every router, filled by each forward pass in turn: ``routing/PASS/LAYER``."""
    found: dict[str, torch.Tensor] = {}
    for layer in (layer for chunk in engine.chunks for layer in chunk.decoder.layers):
        passes = itertools.count()

        def see(module, given, result, layer=layer.layer_number - 1, passes=passes):
            number = next(passes)
            found[f"routing/{number}/{layer}"] = result[1].cpu().to(torch.uint8)
            found[f"weights/{number}/{layer}"] = result[0].detach().cpu().clone()

        layer.mlp.router.register_forward_hook(see)
    return found


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
    if "drive" in case:
        from drive_ranks import drive

        return drive(case, out)
    cfg = Config.model_validate(case["config"])
    engine = MegatronEngine(cfg)
    rank = dist.get_rank()
    save_file(held(engine), out / f"start-{rank}.safetensors")
    batches = batches_of(case, cfg)
    denominator = float(sum(b.loss_mask.sum() for b in batches))
    mine = share_of(batches, engine.grid.place(rank).data, engine.grid.data)
    engine.set_learning_rate(case["learning_rate"])
    routed = watch_routers(engine) if "replay" in case else {}
    stats = {f"log_probs/{i}": s.log_probs.cpu() for i, s in enumerate(engine.token_stats(mine))} if case["steps"] else {}
    stats |= routed
    reports = [engine.train_step(mine, nll, denominator) for _ in range(case["steps"])]
    save_file({**held(engine), **stats}, out / f"end-{rank}.safetensors")
    gathered = {entry.name: entry.tensor.cpu() for entry in exported_tensors(engine, cfg)} if case.get("gather", True) else {}
    record = [{"loss": r.metrics["loss"], "entropy": r.metrics["entropy"], "grad_norm": r.grad_norm, "skipped": r.skipped} for r in reports]
    (out / f"reports-{rank}.json").write_text(json.dumps(record))
    if rank == 0:
        save_file(gathered, out / "gathered.safetensors")
        for server in case.get("publish", ()):
            publish(gathered, **server)
    for server in case.get("publish_ranks", ()):
        publish_from_ranks(engine, cfg, out, **server)
    if case.get("critic"):
        train_critic(engine, cfg, case, out)
    if case.get("engines"):
        send_to_engines(engine, cfg, case, out)
    if case["steps"]:
        check_poisoned_step(engine, mine, denominator)
    dist.barrier()


def train_critic(engine: MegatronEngine, cfg: Config, case: dict, out: Path) -> None:
    """Three steps towards random returns (the first moves the head of zeros alone), and the values afterwards."""
    rank = dist.get_rank()
    batches = batches_of(case, cfg)
    generator = torch.Generator().manual_seed(case["seed"])
    zeros = [torch.zeros(b.loss_mask.shape) for b in batches]
    batches = [
        replace(b, values=z, returns=torch.randn(z.shape, generator=generator) * b.loss_mask) for b, z in zip(batches, zeros, strict=True)
    ]
    denominator = float(sum(b.loss_mask.sum() for b in batches))
    critic = ValueEngine(cfg)
    critic.start_from(engine.named_masters())
    critic.set_learning_rate(case["learning_rate"])
    mine = share_of(batches, critic.grid.place(rank).data, critic.grid.data)
    loss_fn = make_value_loss_fn(CriticConfig())
    reports = [critic.train_step(mine, loss_fn, denominator) for _ in range(3)]
    record = [{**r.metrics, "grad_norm": r.grad_norm} for r in reports]
    (out / f"critic-{rank}.json").write_text(json.dumps(record))
    found = {f"values/{i}": v.cpu() for i, v in enumerate(critic.values(mine))}
    found |= {f"master/{n}": m.cpu() for n, m in critic.named_masters() if "output_layer" in n or "router" in n}
    save_file(found, out / f"critic-{rank}.safetensors")


def check_poisoned_step(engine: MegatronEngine, mine: list[PackedBatch], denominator: float) -> None:
    """A non-finite gradient on one rank stops the step on all."""
    factor = float("nan") if dist.get_rank() == dist.get_world_size() - 1 else 1.0
    report = engine.train_step(mine, lambda s, b: (nll(s, b)[0] * factor, {}), denominator)
    assert report.skipped
    assert engine.policy_version > 0


def publish(tensors: dict[str, torch.Tensor], url: str, token_file: str, policy_version: int) -> None:
    """Deliver whole tensors into a server; raises unless every rank of it holds their bytes afterwards."""
    publisher = WeightPublisher(url, Path(token_file).read_text(), transport="ipc", device=torch.device("cpu"), max_bucket_bytes=256 << 10)
    report = publisher.publish((ExportedTensor(name=n, tensor=t) for n, t in tensors.items()), policy_version=policy_version)
    assert report.receipt is not None
    publisher.close()


def publish_from_ranks(
    engine: MegatronEngine, cfg: Config, out: Path, name: str, url: str, token_file: str, rollout: dict, versions: list[int]
) -> None:
    """Every rank sends its own rows into a server of the sizes in ``rollout``; raises unless every piece arrived everywhere."""
    cfg = cfg.model_copy(update={"rollout": cfg.rollout.model_copy(update=rollout | {"timeout_s": 600.0})})
    control = UpdateControl(url, Path(token_file).read_text(), timeout_s=600) if engine.rank == 0 else None
    publisher = rank_publisher(engine, cfg, control)
    publisher._max_bytes = 256 << 10
    tensors, scales = by_chunk(engine.named_local_weights(), engine.layout_of(engine.rank))
    with LargestAllocation() as seen:
        for version in versions:
            report = publisher.publish(tensors, scales, policy_version=version)
            assert report.receipt is not None
    (out / f"published-{name}-{engine.rank}.json").write_text(
        json.dumps({"bytes": report.num_bytes, "digest": report.receipt.combined, "largest_allocation": seen.largest})
    )
    publisher.close()


class LargestAllocation(TorchDispatchMode):
    """Bytes of the largest storage that an operation made."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        made = [t.untyped_storage() for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        self.largest = max([self.largest, *(storage.nbytes() for storage in made if storage.data_ptr() not in given)])
        return result


class DyingGroup(PairGroup):
    """Kills its process after two messages."""

    messages = 0

    def _started(self, start, message, rank):
        if rank is not None:
            self.messages += 1
            if self.messages > 2:
                os.kill(os.getpid(), signal.SIGKILL)
        return super()._started(start, message, rank)


def device_of(case: dict) -> torch.device:
    return torch.device("cuda", int(os.environ["LOCAL_RANK"])) if case["config"]["run"]["backend"] == "cuda" else torch.device("cpu")


def pair_group(rank: int, case: dict, world: int, out: Path) -> PairGroup:
    """The group of all trainer and engine ranks; rank 0 says in a file where it listens."""
    size, kind = world + case["engines"], DyingGroup if rank == case.get("victim") else PairGroup
    device, note = device_of(case), out / "port"
    if rank == 0:
        port, join = kind.listen("127.0.0.1", size, device=device, timeout_s=60)
        leave_note(note, str(port))
        return join()
    return kind.join("127.0.0.1", int(await_note(note)), rank, size, device=device, timeout_s=60)


def send_to_engines(engine: MegatronEngine, cfg: Config, case: dict, out: Path) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    plan = transfer_plan(cfg, world, engine.ground.spec)
    group = pair_group(rank, case, world, out)
    tensors, scales = by_chunk(engine.named_local_weights(), engine.layout_of(rank))
    options = {"device": device_of(case), "policy_version": engine.policy_version, "max_bytes": case["max_bytes"]}
    with LargestAllocation() as seen:
        report = send(plan, rank, tensors, scales, group, **options)
    leave_together(group, rank, world + case["engines"], out)
    (out / f"transfer-{rank}.json").write_text(json.dumps(asdict(report) | {"largest_allocation": seen.largest}))


def leave_together(group: PairGroup, rank: int, size: int, out: Path) -> None:
    """A rank that is done may have sent what is still on the way."""
    leave_note(out / f"done-{rank}", "")
    for other in range(size):
        await_note(out / f"done-{other}")
    group.abort()


def engine_parameters(cfg: Config, plan: Plan, rank: int) -> dict[str, torch.Tensor]:
    """Parameters as vLLM's rank has them, every byte set: NaN in E4M3, BF16 and FP32."""
    found = {}
    fp8 = QuantizationPlan.from_config(cfg).is_fp8
    for shard in engine_shards(to_hf_config(cfg.model, None), plan.rollout, rank, fp8=fp8):
        forms = [(shard.name, shard.shape, getattr(torch, shard.dtype))]
        forms += [(scale_name(shard.name), shard.scale_shape, torch.float32)] if shard.fp8 else []
        for name, shape, dtype in forms:
            found[name] = torch.full((math.prod(shape) * dtype.itemsize,), 255, dtype=torch.uint8).view(dtype).view(shape)
    return found


def run_engine(case: dict, rank: int, world: int, out: Path) -> None:
    """One engine rank: plain tensors of vLLM's shapes, filled by the trainer's ranks."""
    cfg = Config.model_validate(case["config"])
    device = device_of(case)
    plan = transfer_plan(cfg, world, "te" if device.type == "cuda" else "local")
    parameters = {name: tensor.to(device) for name, tensor in engine_parameters(cfg, plan, rank).items()}
    group = pair_group(world + rank, case, world, out)
    with LargestAllocation() as seen:
        options = {
            "device": device,
            "policy_version": case.get("engine_version", case["steps"]),
            "max_bytes": case["max_bytes"],
        }
        report = receive(plan, rank, parameters, group, **options)
    leave_together(group, world + rank, world + case["engines"], out)
    save_file({name: tensor.cpu() for name, tensor in parameters.items()}, out / f"engine-{rank}.safetensors")
    (out / f"transfer-{world + rank}.json").write_text(json.dumps(asdict(report) | {"largest_allocation": seen.largest}))


def run_rank(out: Path) -> int:
    """Exit status of one rank: 2 and one sentence for what a user can act on."""
    case, rank, world = json.loads((out / "case.json").read_text()), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        if rank < world:
            main(case, out)
        else:
            run_engine(case, rank - world, world, out)
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
    engines = json.loads((out / "case.json").read_text()).get("engines", 0)
    for rank in range(world + engines):
        child = os.fork()
        if child == 0:
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
            os.dup2(os.open(out / f"stderr-{rank}", os.O_WRONLY | os.O_CREAT), 2)
            os._exit(run_rank(out))
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(run_rank(Path(sys.argv[1])))
    for line in sys.stdin:
        world, port, out = line.rstrip("\n").split(" ", 2)
        print(json.dumps(fork_ranks(int(world), port, Path(out))), flush=True)
