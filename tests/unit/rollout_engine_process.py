"""One process with one real vLLM engine; records what it did for the tests to judge.

Usage: ``python rollout_engine_process.py {qwen3|qwen3_moe} {fp8|bf16} {fp32|pow2} {mixed|fp32|fp8} {cpu|cuda} OUT_DIR``. vLLM allows one
engine of a kind in a process, so the tests start this file once for each model.
"""

import json
import random
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from random_models import exported, hf_config, random_weights
from safetensors.torch import save_file

from e2e_fp8.config.root import Config
from e2e_fp8.errors import UserError
from e2e_fp8.rollout.engine import VllmEngine
from e2e_fp8.types import ExportedTensor, Prompt, Sample

Weights = dict[str, torch.Tensor]
Result = dict[str, Any]
"""What the tests judge."""
EOS = 1
TEMPERATURE = 0.7
PROMPTS = [Prompt(uid=f"p{i}", text="", token_ids=(2, 3 + i, 7, 5 + i), answer="") for i in range(4)]


def record(samples: list[Sample]) -> list[dict]:
    """Samples as plain values, with exact log-probs."""
    keys = ("group_id", "response_token_ids", "response_text", "rollout_log_probs", "routed_experts", "finish_reason", "policy_version")
    return [{"uid": s.prompt.uid, "prompt": s.prompt.token_ids} | {key: getattr(s, key) for key in keys} for s in samples]


def refusal(call, of: type[Exception] = UserError) -> str:
    """``ErrorClass: message`` of the error that ``call`` raises; empty when it raises none."""
    try:
        call()
    except of as error:
        return f"{type(error).__name__}: {error}"
    return ""


def until(tensors: Iterator[ExportedTensor], count: int) -> Iterator[ExportedTensor]:
    """A trainer that fails after ``count`` tensors."""
    yield from islice(tensors, count)
    raise RuntimeError("the trainer failed in the middle of its export")


def live(engine: VllmEngine) -> dict[str, torch.Tensor]:
    return {entry.name: entry.tensor.cpu().clone() for entry in engine.read_back()}


def gate_logits(engine: VllmEngine, x: torch.Tensor) -> torch.Tensor | None:
    """What the live gate of layer 0 makes of ``x``; None for a dense model."""

    def apply(model: torch.nn.Module) -> torch.Tensor | None:
        gate = dict(model.named_modules()).get("model.layers.0.mlp.gate")
        return None if gate is None else gate(x.to(next(model.parameters()).device))[0].cpu()

    return engine._thread.run("reading a gate", 60.0, lambda: engine._llm.apply_model(apply)[0])


def configuration(architecture: str, precision: str, scale_format: str, router: str, device: str) -> Config:
    return Config.model_validate(
        {
            "model": {"architecture": architecture},
            "numerics": {
                "training_precision": precision,
                "rollout_precision": precision,
                "scale_format": scale_format,
                "router_precision": router,
            },
            "rollout": {"temperature": TEMPERATURE, "max_response_tokens": 12, "max_model_len": 64, "max_num_seqs": 32, "kv_cache_gib": 1},
            "run": {"backend": device, "seed": 3},
        }
    )


def started(cfg: Config, model_dir: Path, result: Result) -> VllmEngine:
    """The engine; random numbers of the process before and after."""
    model_dir.mkdir()
    result["config"] = hf_config(cfg)
    (model_dir / "config.json").write_text(json.dumps(result["config"]))
    random.seed(5)
    torch.manual_seed(5)
    engine = VllmEngine(cfg, model_dir, EOS, lambda ids: "".join(chr(33 + i) for i in ids))
    result["host_state_kept"] = (random.random(), torch.rand(3).tolist())
    random.seed(5)
    torch.manual_seed(5)
    result["host_state_expected"] = (random.random(), torch.rand(3).tolist())
    return engine


def generate(engine: VllmEngine, seed: int = 9) -> list[dict]:
    return record(engine.generate(PROMPTS, group_size=4, seed=seed))


def update(engine: VllmEngine, result: Result, first: Weights, second: Weights) -> None:
    """No weights, the first, the second in another order."""
    result["before_weights"] = refusal(lambda: generate(engine))
    result["router_input"] = torch.randn(5, engine.cfg.model.hidden_size).bfloat16()
    engine.update_weights(exported(first), policy_version=1)
    result["router_logits"] = gate_logits(engine, result["router_input"])
    result["live_first"], result["samples_first"], result["samples_repeat"] = live(engine), generate(engine), generate(engine)
    result["samples_other_seed"] = generate(engine, 10)
    engine.update_weights(exported(dict(reversed(second.items()))), policy_version=2)
    result["live_second"], result["samples_second"] = live(engine), generate(engine)


def fail_to_update(engine: VllmEngine, result: Result, first: Weights, second: Weights) -> None:
    """Sets that are not the model, a trainer that fails, a torn update, and a retry."""

    def refused(tensors: Iterator[ExportedTensor], of: type[Exception] = UserError) -> str:
        return refusal(lambda: engine.update_weights(tensors, policy_version=3), of)

    result["missing"] = refused(exported(dict(list(first.items())[:-1])))
    result["recast"] = refused(exported({name: t.float() if name == "model.norm.weight" else t for name, t in first.items()}))
    part = "model.layers.1.self_attn.k_proj.weight" + ("_scale_inv" if engine.cfg.numerics.rollout_precision == "fp8" else "")
    result["missing_part"] = refused(exported({n: t for n, t in first.items() if n != part}))
    result["trainer_died"] = refused(until(exported(first), len(first) // 2), RuntimeError)
    result["samples_after_refusals"] = generate(engine)
    # The names, shapes and dtypes are right, but one tensor has no bytes: the engine is half-way through when it finds out.
    result["torn"] = refused(exported({n: t.to("meta") if n == "model.layers.1.self_attn.v_proj.weight" else t for n, t in first.items()}))
    result["after_torn"] = refusal(lambda: generate(engine))
    engine.update_weights(exported(second), policy_version=3)
    result["live_retried"], result["samples_retried"] = live(engine), generate(engine)


def main(architecture: str, precision: str, scale_format: str, router: str, device: str, out: Path) -> None:
    cfg = configuration(architecture, precision, scale_format, router, device)
    first, second = random_weights(cfg, 11), random_weights(cfg, 12)
    result: Result = {"first": first, "second": second}
    engine = started(cfg, out / "model", result)
    update(engine, result, first, second)
    fail_to_update(engine, result, first, second)
    save_file({name: t.contiguous() for name, t in first.items()}, out / "model.safetensors")
    engine.update_weights_from_disk(out, policy_version=4)
    result["live_disk"], result["samples_disk"] = live(engine), generate(engine)
    long = Prompt(uid="too-long", text="", token_ids=(2,) * 53, answer="")
    result["too_long"] = refusal(lambda: engine.generate([long], group_size=2, seed=1))
    stop = chr(33 + result["samples_disk"][0]["response_token_ids"][3])
    engine.cfg = cfg.model_copy(update={"rollout": cfg.rollout.model_copy(update={"stop": (stop,)})})
    result["stop"], result["samples_stop"] = stop, generate(engine)
    engine.cfg = cfg.model_copy(update={"rollout": cfg.rollout.model_copy(update={"timeout_s": 1e-3})})
    result["wedged"], result["dead"] = refusal(lambda: generate(engine)), refusal(lambda: generate(engine))
    torch.save(result, out / "result.pt")


if __name__ == "__main__":
    main(*sys.argv[1:6], Path(sys.argv[6]))
