#!/usr/bin/env python3
"""What ``numerics.alignment: bitwise`` costs: tokens per second of rollout and training at both levels, in one run.

    benchmarks/alignment_cost.py {qwen3-8b|qwen3-30b-a3b|tiny|CONFIG.yaml} [--parts rollout:fast,rollout:bitwise] [--lock FILE]

Every part is a process of its own, because vLLM allows one engine in a process, and every part of one kind does the same work. Rollout:
vLLM's dummy weights in all or ``--rollout-layers`` layers, all sequences sampled at once, CUDA graphs on at both levels, compilation where
the level allows it (``fast``). One shorter run of the same shapes comes first, so that kernels are compiled and warm, and rounds of both
levels come by turns: at small sizes the host's Python is most of a step, and its speed changes from second to second. Training: a model
of ``--layers`` layers of that shape from scratch, whole optimizer steps on random tokens. Prints one JSON object; exit code 1 when a part
failed.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from kernel_tables import kernel_tables
from transports import MODELS, alone

from e2e_fp8.config.load import load_config, parse_config
from e2e_fp8.orchestration.environment import prepare

LEVELS = ("fast", "bitwise")
PARTS = tuple(f"{kind}:{level}" for kind in ("rollout", "training") for level in LEVELS)
ERROR_TAIL = 4000
"""Characters of a failed part's output that are shown."""


def part_config(args: argparse.Namespace, level: str, layers: int | None) -> Any:
    """The run configuration of one part."""
    window = args.prompt_tokens + args.new_tokens
    if args.model in MODELS:
        values: dict[str, Any] = {"model": MODELS[args.model]}
        cfg = parse_config(values | {"training": {"max_tokens_per_microbatch": max(4096, window)}})
    else:
        cfg = load_config(args.model, [])
    model = cfg.model if layers is None else cfg.model.model_copy(update={"num_hidden_layers": min(layers, cfg.model.num_hidden_layers)})
    rollout = cfg.rollout.model_copy(
        update={
            "max_model_len": window,
            "max_response_tokens": args.new_tokens,
            "max_num_seqs": args.sequences,
            "kv_cache_gib": args.kv_cache_gib,
            "capture_routed_experts": False,
            "enforce_eager": args.eager,
            "moe_backend": args.fast_moe_backend if level == "fast" else "deep_gemm",
            "placement": "in_process",
        }
    )
    numerics = cfg.numerics.model_copy(update={"alignment": level, "alignment_overrides": {}})
    run = cfg.run.model_copy(update={"backend": args.backend})
    return prepare(cfg.model_copy(update={"model": model, "rollout": rollout, "numerics": numerics, "run": run}))


def wait_for_all(args: argparse.Namespace) -> None:
    """Until every part has started or failed: a start beside a measurement would take its processors."""
    if args.ready is None:
        return
    (args.ready / args.part).touch()
    while any(not (args.ready / part).exists() for part in args.parts.split(",")):
        time.sleep(0.1)


def in_turn(args: argparse.Namespace, call: Callable[[], Any]) -> Any:
    """``call`` alone; parts that measure side by side take turns, so that what else the machine does meets all of them."""
    with alone(args.lock):
        result = call()
    if args.ready is not None:
        # longer than another part takes to see that the lock is free
        time.sleep(0.05)
    return result


def rollout(args: argparse.Namespace, level: str, scratch: Path) -> dict[str, Any]:
    """Sampling speed of one engine."""
    cfg = part_config(args, level, args.rollout_layers)
    import torch

    from e2e_fp8.config.hf import to_hf_config
    from e2e_fp8.numerics.quantization_plan import QuantizationPlan
    from e2e_fp8.rollout.engine import VllmEngine
    from e2e_fp8.rollout.engine_args import compilation_config, engine_args

    class Engine(VllmEngine):
        def _loader_args(self) -> dict[str, Any]:
            usual = engine_args(self.cfg, scratch, device=self.device, is_moe=self.cfg.model.is_moe, fp8=True)
            choices = usual["additional_config"]["e2e_fp8"]["alignment"]
            sizes = [size for size in (1, 8, 64) if size < args.sequences] + [args.sequences]
            graphs = {} if args.eager or self.device == "cpu" else {"cudagraph_capture_sizes": sizes}
            return {
                "max_num_batched_tokens": max(args.step_tokens, args.sequences),
                "compilation_config": compilation_config(choices, self.device) | graphs,
            }

    quantization = QuantizationPlan.from_config(cfg).hf_quantization_config(cfg.model)
    (scratch / "config.json").write_text(json.dumps(to_hf_config(cfg.model, quantization)))
    started = time.perf_counter()
    engine = Engine(cfg, scratch, 0, str)
    start_seconds = time.perf_counter() - started
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(1, cfg.model.vocab_size, (args.sequences, args.prompt_tokens), generator=generator).tolist()

    def sample(new_tokens: int) -> tuple[float, int]:
        settings = {"temperature": 1.0, "max_tokens": new_tokens, "ignore_eos": True}
        requests = [(prompt, settings | {"seed": index}) for index, prompt in enumerate(prompts)]
        engine.reset_prefix_cache()
        begun = time.perf_counter()
        outputs, _ = engine.probe(requests, lambda model: contextlib.nullcontext())
        return time.perf_counter() - begun, sum(len(output.token_ids) for output in outputs)

    with alone(args.lock):
        sample(min(8, args.new_tokens))
    wait_for_all(args)
    rounds = [(in_turn(args, lambda: sample(1))[0], in_turn(args, lambda: sample(args.new_tokens))) for _ in range(args.rounds)]
    with alone(args.lock):
        kernels = kernel_tables(sample, args.new_tokens) if args.profile else {}
    engine.close()
    prefill_seconds, runs = min(prefill for prefill, _ in rounds), [run for _, run in rounds]
    seconds, tokens = min(s for s, _ in runs), runs[0][1]
    return {
        "tokens_per_s": tokens / seconds,
        "decode_tokens_per_s": (tokens - args.sequences) / (seconds - prefill_seconds) if args.new_tokens > 1 else None,
        "prefill_tokens_per_s": args.sequences * args.prompt_tokens / prefill_seconds,
        "seconds": [s for s, _ in runs],
        "prefill_seconds": [prefill for prefill, _ in rounds],
        "tokens": tokens,
        "start_seconds": start_seconds,
        "layers": cfg.model.num_hidden_layers,
    } | kernels


def random_trainer(cfg: Any) -> Any:
    """A trainer of ``cfg`` whose weights are drawn on the device: billions of them on the host take minutes."""
    import torch

    from e2e_fp8.training.engine import MegatronEngine
    from e2e_fp8.training.megatron_model import MegatronModel

    class Trainer(MegatronEngine):
        def __init__(self) -> None:
            MegatronModel.__init__(self, cfg)
            generator = torch.Generator(self.device).manual_seed(0)

            def draw(parameter: Any) -> torch.Tensor:
                weight = torch.ones(parameter.layout.shape, device=self.device)
                return weight if weight.dim() == 1 else weight.normal_(0.0, cfg.model.initializer_range, generator=generator)

            self._load(draw)

    return Trainer()


def random_batch(args: argparse.Namespace, vocab_size: int, device: Any) -> Any:
    """Sequences of random tokens, all as long as one of the rollout's and all trained on."""
    import torch

    from e2e_fp8.types import PackedBatch

    length = args.prompt_tokens + args.new_tokens
    count = max(1, args.train_tokens // length)
    tokens = torch.randint(0, vocab_size, (count * length,), generator=torch.Generator().manual_seed(0)).to(device)
    zeros = torch.zeros(len(tokens), device=device)
    return PackedBatch(
        token_ids=tokens,
        position_ids=torch.arange(length, device=device).repeat(count),
        cu_seqlens=torch.arange(0, count * length + 1, length, dtype=torch.int32, device=device),
        targets=tokens.roll(-1),
        loss_mask=torch.ones_like(zeros),
        advantages=zeros,
        rollout_log_probs=zeros,
        old_log_probs=zeros,
    )


def training(args: argparse.Namespace, level: str, scratch: Path) -> dict[str, Any]:
    """Speed of whole optimizer steps."""
    cfg = part_config(args, level, args.layers)
    import torch

    from e2e_fp8.update.loss_fn import supervised_loss_fn

    trainer = random_trainer(cfg)
    trainer.set_learning_rate(1e-6)
    batch = random_batch(args, cfg.model.vocab_size, trainer.device)
    tokens = len(batch.token_ids)

    def timed(call: Any) -> float:
        begun = time.perf_counter()
        call()
        if trainer.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begun

    def step() -> None:
        report = trainer.train_step([batch], supervised_loss_fn(), float(tokens))
        if report.skipped:
            raise RuntimeError("the optimizer skipped a step, which takes less time than one that it does")

    def score() -> None:
        trainer.token_stats([batch])

    timed(step)
    with alone(args.lock):
        timed(step)
        steps = [timed(step) for _ in range(args.rounds * 2 + 1)]
        scores = [timed(score) for _ in range(args.rounds * 2 + 1)]
    seconds = statistics.median(steps)
    return {
        "tokens_per_s": tokens / seconds,
        "scoring_tokens_per_s": tokens / statistics.median(scores),
        "step_seconds": steps,
        "score_seconds": scores,
        "tokens": tokens,
        "layers": cfg.model.num_hidden_layers,
        "peak_bytes": torch.cuda.max_memory_allocated() if trainer.device.type == "cuda" else 0,
    }


def one_part(argv: list[str], args: argparse.Namespace, part: str, ready: Path) -> dict[str, Any]:
    """What the process of one part measured, or ``error``."""
    print(f"alignment_cost: {part}", file=sys.stderr, flush=True)
    command = [sys.executable, __file__, *argv, "--part", part, *(["--ready", str(ready)] if args.lock else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=args.timeout_s)
    except subprocess.TimeoutExpired as error:
        tail = (error.stderr or b"").decode(errors="replace")[-ERROR_TAIL:]
        return {"error": f"not finished after {args.timeout_s:g} s: {tail}"}
    finally:
        (ready / part).touch()
    records = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not records:
        return {"error": (done.stderr or done.stdout)[-ERROR_TAIL:]}
    return json.loads(records[-1])


def all_parts(argv: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """Each part in a process of its own, with a lock side by side; ratios of bitwise to fast."""
    parts = args.parts.split(",")
    with tempfile.TemporaryDirectory() as ready, ThreadPoolExecutor(len(parts) if args.lock else 1) as pool:
        measured = pool.map(lambda part: one_part(argv, args, part, Path(ready)), parts)
        result: dict[str, Any] = {"model": args.model, "arguments": argv} | dict(zip(parts, measured, strict=True))
    for kind in ("rollout", "training"):
        fast, bitwise = (result.get(f"{kind}:{level}", {}).get("tokens_per_s") for level in LEVELS)
        if fast and bitwise:
            result[f"{kind}_slower"] = 1 - bitwise / fast
    return result


def main() -> int:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help=f"a run configuration, or one of {', '.join(sorted(MODELS))}")
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated (default: all)")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--ready", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--backend", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--step-tokens", type=int, default=16384, help="vLLM's max_num_batched_tokens")
    parser.add_argument("--kv-cache-gib", type=int, default=24)
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs and compilation, at both levels")
    parser.add_argument("--fast-moe-backend", choices=("deep_gemm", "triton"), default="deep_gemm")
    parser.add_argument("--layers", type=int, default=4, help="layers of the trained model")
    parser.add_argument("--rollout-layers", type=int, help="layers of the sampling model (default: all)")
    parser.add_argument("--train-tokens", type=int, default=8192, help="tokens of one optimizer step")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--profile", action="store_true", help="device seconds of sampling by kernel, after the timing")
    parser.add_argument("--lock", type=Path, help="start the parts side by side; they measure in turn, under this file's lock")
    parser.add_argument("--timeout-s", type=float, default=1200.0, help="for each part")
    args = parser.parse_args()
    if args.part is None:
        result = all_parts(sys.argv[1:], args)
        print(json.dumps(result, indent=2))
        return int(any("error" in value for value in result.values() if isinstance(value, dict)))
    kind, level = args.part.split(":")
    with tempfile.TemporaryDirectory() as scratch, contextlib.redirect_stdout(sys.stderr):
        measured = {"rollout": rollout, "training": training}[kind](args, level, Path(scratch))
    print(json.dumps(measured))
    return 0


if __name__ == "__main__":
    sys.exit(main())
