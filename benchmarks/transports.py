#!/usr/bin/env python3
"""Seconds and bytes of weight syncs at published model sizes, beside a device copy of the same bytes and the BF16 path of peers.

    benchmarks/transports.py {qwen3-8b|qwen3-30b-a3b|tiny} {shared|local|ipc|nccl|disk} [--rounds 5] [--lock FILE] [--backend cuda|cpu]

The trainer's memory is stood in for by random FP8 codes laid out as the trainer lays them out (one block for each of vLLM's parameters);
the receiving side is a real vLLM engine of that size. ``local`` also measures the path of other projects: BF16 weights, quantized by
vLLM's own block quantizer, loaded by vLLM's own reload. vLLM allows one engine a process, so there is one run for each transport.
Prints one JSON object.
"""

import argparse
import contextlib
import fcntl
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from e2e_fp8.config.load import parse_config
from e2e_fp8.orchestration.environment import prepare

DENSE = {"architecture": "qwen3", "vocab_size": 151936, "head_dim": 128, "max_position_embeddings": 40960}
MOE = DENSE | {"architecture": "qwen3_moe"}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-8b": DENSE
    | {"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 12288},
    "qwen3-30b-a3b": MOE
    | {"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4}
    | {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8},
    "tiny": MOE | {"vocab_size": 256},
}
"""Published dimensions as model sections; weights are random."""


def trainer_memory(layout: list, device: Any) -> dict[str, Any]:
    """Random weights under HF names, one block of memory for each of vLLM's parameters."""
    import torch

    slots_of: dict[str, list] = {}
    for slot in layout:
        slots_of.setdefault(slot.parameter, []).append(slot)
    tensors = {}
    for slots in slots_of.values():
        dtype = slots[0].dtype
        block = torch.empty(sum(torch.Size(s.shape).numel() for s in slots), dtype=dtype, device=device)
        if dtype == torch.float8_e4m3fn:
            block.view(torch.uint8).random_(0, 120)
        else:
            block.uniform_(0.01, 0.02)
        start = 0
        for slot in sorted(slots, key=lambda s: (s.expert or 0, s.row)):
            size = torch.Size(slot.shape).numel()
            tensors[slot.name] = block[start : start + size].view(slot.shape)
            start += size
    return tensors


REMOTE = ("ipc", "nccl", "disk")
"""Transports into a vLLM server of its own process."""


def timed(call: Callable[[], object], rounds: int) -> dict[str, float]:
    """Median and minimum of wall seconds, device idle before and after."""
    import torch

    seconds = []
    for _ in range(rounds):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return spread(seconds)


def spread(seconds: list[float]) -> dict[str, float]:
    """Median and minimum."""
    return {"median": statistics.median(seconds), "min": min(seconds)}


def device_copy(num_bytes: int, device: Any, to: Any) -> Callable[[], object]:
    """A plain copy of that many bytes, in pieces of at most 2 GiB between the same two buffers."""
    import torch

    piece = min(num_bytes, 2 << 30)
    source = torch.zeros(piece, dtype=torch.uint8, device=device)
    target = torch.empty_like(source, device=to)
    pieces = [min(piece, num_bytes - start) for start in range(0, num_bytes, piece)]
    return lambda: [target[:size].copy_(source[:size]) for size in pieces]


def quantized_from_bf16(layout: list, device: Any) -> Iterator[tuple[str, Any]]:
    """What peers send: each BF16 weight through vLLM's block quantizer, everything else as it is."""
    import torch
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    masters: dict[tuple[int, ...], Any] = {}
    for slot in layout:
        if slot.name.endswith("_scale_inv"):
            continue
        if slot.shape not in masters:
            masters[slot.shape] = torch.empty(slot.shape, dtype=torch.bfloat16, device=device).uniform_(-0.02, 0.02)
        if not slot.fp8:
            yield slot.name, masters[slot.shape]
            continue
        codes, scale_inv = per_block_cast_to_fp8(masters[slot.shape], [128, 128], use_ue8m0=False)
        yield slot.name, codes
        yield slot.name + "_scale_inv", scale_inv


def run_config(args: argparse.Namespace) -> Any:
    """The run configuration of the engine."""
    server = args.transport in REMOTE
    rollout: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 8, "kv_cache_gib": 1, "capture_routed_experts": False}
    rollout |= {"placement": "server", "server_devices": args.server_devices} if server else {}
    values = {"run": {"backend": args.backend}, "rollout": rollout, "model": MODELS[args.model], "sync": {"transport": args.transport}}
    return prepare(parse_config(values))


def start_engine(cfg: Any, scratch: Path, entries: tuple) -> Any:
    """The receiving side of the configured transport."""
    from e2e_fp8.config.hf import to_hf_config
    from e2e_fp8.export.policy_folder import checkpoint_writer
    from e2e_fp8.numerics.quantization_plan import QuantizationPlan
    from e2e_fp8.rollout.engine import VllmEngine
    from e2e_fp8.rollout.server_engine import ServerEngine
    from e2e_fp8.rollout.shared_engine import SharedVllmEngine, TrainerMemory

    model_dir = scratch / "model"
    model_dir.mkdir()
    quantization = QuantizationPlan.from_config(cfg).hf_quantization_config(cfg.model)
    (model_dir / "config.json").write_text(json.dumps(to_hf_config(cfg.model, quantization)))
    if cfg.rollout.placement == "server":
        return ServerEngine(cfg, model_dir, 0, str, checkpoint_writer(model_dir))
    if cfg.sync.transport == "shared":
        memory = TrainerMemory(tensors=lambda: entries, policy_version=lambda: 0)
        return SharedVllmEngine(cfg, model_dir, 0, str, memory)
    return VllmEngine(cfg, model_dir, 0, str)


def measure(args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """One engine, all measurements of its transport."""
    cfg = run_config(args)
    import torch

    from e2e_fp8.config.hf import to_hf_config
    from e2e_fp8.numerics.quantization_plan import QuantizationPlan
    from e2e_fp8.rollout.engine_layout import engine_layout
    from e2e_fp8.types import ExportedTensor

    device = torch.device(cfg.run.backend)
    layout = engine_layout(to_hf_config(cfg.model, QuantizationPlan.from_config(cfg).hf_quantization_config(cfg.model)))
    tensors = trainer_memory(layout, device)
    entries = tuple(ExportedTensor(name=name, tensor=tensor) for name, tensor in tensors.items())
    num_bytes = sum(t.numel() * t.element_size() for t in tensors.values())
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    engine = start_engine(cfg, scratch, entries)
    result: dict[str, Any] = {"model": args.model, "transport": args.transport, "tensors": len(entries), "bytes": num_bytes}
    with alone(args.lock):
        result |= measurements(args, engine, entries, layout, device, before)
    engine.close()
    result["device"] = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    return result


@contextlib.contextmanager
def alone(lock: Path | None) -> Iterator[None]:
    """Hold the file's lock: of benchmarks that start side by side, one measures at a time, beside the idle engines of the others."""
    if lock is None:
        yield
        return
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def measurements(args: argparse.Namespace, engine: Any, entries: tuple, layout: list, device: Any, before: int) -> dict[str, Any]:
    """Syncs and receipts, and beside them the copies and the path of peers."""
    import torch

    result: dict[str, Any] = {}
    num_bytes = sum(entry.tensor.numel() * entry.tensor.element_size() for entry in entries)
    if args.transport in REMOTE:
        result |= remote_syncs(engine, entries, args.rounds)
    else:
        result |= local_syncs(engine, entries, args.rounds)
        result["engine_bytes_beside_trainer"] = (torch.cuda.memory_allocated() - before) if device.type == "cuda" else 0
    result["device_copy_seconds"] = timed(device_copy(num_bytes, device, device), args.rounds)
    if args.transport == "nccl" and device.type == "cuda":
        result["copy_to_the_other_gpu_seconds"] = timed(device_copy(num_bytes, device, torch.device("cuda", 1)), args.rounds)
    if args.transport in REMOTE:
        result |= ratios(result)
    if args.transport == "local" and device.type == "cuda":
        result["bf16_quantize_reload_seconds"] = timed(lambda: reload_quantized(engine, layout, device), max(2, args.rounds // 2))
    return result


def local_syncs(engine: Any, entries: tuple, rounds: int) -> dict[str, Any]:
    """In-process updates and the receipt of both sides."""
    from e2e_fp8.sync.receipt import ManifestSeries, check_receipt

    copied = engine.update_weights(entries, policy_version=0)
    # the second is the first that comes settled, and prepares its copies
    engine.update_weights(entries, policy_version=0)
    seconds = timed(lambda: engine.update_weights(entries, policy_version=0), rounds)
    ours, theirs = ManifestSeries(), ManifestSeries()

    def receipt() -> None:
        read_back = theirs.of(engine.read_back(), covered=engine.covered)
        check_receipt(ours.of(entries, covered=engine.covered), read_back, policy_version=0)

    receipt()
    return {"bytes_copied": copied, "sync_seconds": seconds, "receipt_seconds_both_sides": timed(receipt, rounds), "receipt_equal": True}


TRAINING_S = 0.05
"""Stands for the training between an announcement and its sync."""


def train(device: Any) -> None:
    """Keep the trainer's device busy, as training does: one that was idle copies and sends slower at first."""
    import torch

    matrix = torch.ones(4096 if device.type == "cuda" else 256, 256, device=device)
    until = time.perf_counter() + TRAINING_S
    while time.perf_counter() < until:
        for _ in range(16):
            torch.mm(matrix, matrix.T)
        if device.type == "cuda":
            torch.cuda.synchronize(device)


KINDS = ("none", "generation", "answers")
"""What waits for the receipt: nothing, as there is none; generation; or answers alone (``sync.receipt_before``)."""


def remote_syncs(engine: Any, entries: tuple, rounds: int) -> dict[str, Any]:
    """Updates of the server without a receipt and with one of each kind, by turns, then the same announced before. Three come first, in
    which things are prepared. Before each one the trainer's device works, and after it a request for one token is answered."""
    for version in range(3):
        engine.publish(entries, policy_version=version, receipt=True)
        first_token(engine)
    can_arm = engine.arm(3, receipt=False)
    engine.disarm()
    kinds = [(armed, kind) for armed in ((False, True) if can_arm else (False,)) for kind in KINDS]
    syncs: dict[tuple[bool, str], list[Sync]] = {kind: [] for kind in kinds}
    for turn in range(len(kinds) * rounds):
        armed, kind = kinds[turn % len(kinds)]
        options = {"receipt": kind != "none", "before": "answers" if kind == "answers" else "generation"}
        if armed:
            engine.arm(3 + turn, **options)
        train(entries[0].tensor.device)
        started = time.perf_counter()
        report = engine.publish(entries, policy_version=3 + turn, **options)
        whole = time.perf_counter() - started
        first_token(engine)
        answered = time.perf_counter() - started
        if report.armed != armed or (kind == "answers") != (report.pending is not None):
            raise RuntimeError("a sync was not of the kind that was asked for, so that it measures something else")
        syncs[armed, kind].append((report.settled(), whole, answered))
    result = sync_figures({kind: syncs[False, kind] for kind in KINDS})
    if can_arm:
        result |= {f"armed_{name}": value for name, value in sync_figures({kind: syncs[True, kind] for kind in KINDS}).items()}
    return result


Sync = tuple[Any, float, float]
"""Report, and seconds from the call's begin until it returned, and until the request after it was answered."""


def first_token(engine: Any) -> None:
    """One greedy token of a short prompt."""
    params = {"temperature": 0.0, "max_tokens": 1, "detokenize": False}
    engine.publisher.client.post("/inference/v1/generate", {"token_ids": [5, 6, 7, 8], "sampling_params": params})


def sync_figures(syncs: dict[str, list[Sync]]) -> dict[str, Any]:
    """Of syncs by what waits for their receipt.

    ``sync_seconds``: from the call until the trainer knows that every engine rank holds every byte, without a receipt. Of a receipt,
    ``extra_seconds``: by how much the whole call is longer (after which the server generates) than the one without in the same round, the
    median of all rounds and the quarters around it; ``share_of_sync``: the median over ``sync_seconds``; ``compared_seconds``: from the
    last byte until bytes were compared; ``answer_later_seconds``: by how much the first answer is later.
    """
    plain = syncs["none"]
    sync, result = spread([r.seconds for r, _, _ in plain]), {}
    wholes = {kind: spread([whole for _, whole, _ in found]) for kind, found in syncs.items()}
    answers = {kind: spread([answered for _, _, answered in found]) for kind, found in syncs.items()}
    for kind in KINDS[1:]:
        extra = [more - less for (_, more, _), (_, less, _) in zip(syncs[kind], plain, strict=True)]
        low, middle, high = statistics.quantiles(extra, n=4)
        result[f"receipt_before_{kind}"] = {
            "extra_seconds": {"median": middle, "quarters": [low, high]},
            "share_of_sync": middle / sync["median"],
            "compared_seconds": spread([r.receipt_seconds for r, _, _ in syncs[kind]]),
            "answer_later_seconds": answers[kind]["median"] - answers["none"]["median"],
            "sync_seconds": spread([r.seconds for r, _, _ in syncs[kind]]),
        }
    return result | {
        "phase_seconds": {kind: {p: spread([r.phases.get(p, 0.0) for r, _, _ in s]) for p in s[-1][0].phases} for kind, s in syncs.items()},
        "bytes_copied": plain[-1][0].num_bytes,
        "sync_seconds": sync,
        "wire_seconds": spread([r.phases["send: engine copies"] for r, _, _ in plain]),
        "publish_seconds": wholes,
        "first_answer_seconds": answers,
        "receipt_equal": all(r.receipt is not None for kind in KINDS[1:] for r, _, _ in syncs[kind]),
    }


def ratios(result: dict[str, Any]) -> dict[str, float]:
    """The sync and its bytes on the way over the plain copy that it stands beside: between the GPUs where there are two."""
    copy = result.get("copy_to_the_other_gpu_seconds", result["device_copy_seconds"])["median"]
    parts = ("sync", "wire", "armed_sync", "armed_wire")
    return {f"{part}_over_copy": result[f"{part}_seconds"]["median"] / copy for part in parts if f"{part}_seconds" in result}


def reload_quantized(engine: Any, layout: list, device: Any) -> None:
    """Quantize and load everything by vLLM's layerwise reload."""
    from e2e_fp8.rollout.weight_transfer import post

    token = post(quantized_from_bf16(layout, device))
    engine._update(lambda: engine._layerwise_reload({"token": token}), 0, reload=True)


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=sorted(MODELS))
    parser.add_argument("transport", choices=("shared", "local", *REMOTE))
    parser.add_argument("--server-devices", default=None, help="CUDA_VISIBLE_DEVICES of the server, for example 1 with nccl")
    parser.add_argument("--rounds", type=int, default=5, help="at least 2")
    parser.add_argument("--lock", type=Path, default=None, help="file that benchmarks started side by side measure under, one at a time")
    parser.add_argument("--backend", choices=("auto", "cpu", "cuda"), default="auto")
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error(f"--rounds is {args.rounds}: differences between rounds need at least 2.")
    with tempfile.TemporaryDirectory() as scratch:
        print(json.dumps(measure(args, Path(scratch)), indent=2))


if __name__ == "__main__":
    main()
