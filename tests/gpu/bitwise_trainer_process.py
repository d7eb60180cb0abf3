"""A trainer with operators shared with the engine on one Hopper GPU; ``CHECK ARCHITECTURE`` are the arguments. Prints ``ok``.

Run in a fresh process, because Transformer Engine reads the scale kind when it is imported.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from training_cases import fresh_generator, nll, random_batch, small_config, trained_tokens

from e2e_fp8.config.alignment import CAUSES, choices_at
from e2e_fp8.config.root import Config
from e2e_fp8.numerics import row_invariant
from e2e_fp8.numerics.blockwise import quantize_blockwise
from e2e_fp8.training.engine import MegatronEngine


def config(architecture: str, precision: str = "fp8", *, numerics: dict[str, Any] | None = None, **model: Any) -> Config:
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, **model}
    cfg = small_config(architecture, precision, numerics=numerics, **sizes)
    return cfg.model_copy(update={"run": cfg.run.model_copy(update={"backend": "cuda"})})


def forward(engine: MegatronEngine, lengths: list[int], generator: torch.Generator) -> tuple[Any, torch.Tensor]:
    batch = random_batch(lengths, generator)
    with torch.no_grad():
        return batch, engine.logits(batch)


def rows(architecture: str) -> None:
    """A sequence has the same logits and log-probs alone and among 63 others, before and after training."""
    generator, lengths = fresh_generator(), torch.randint(1, 120, (64,)).tolist()
    engine = MegatronEngine(config(architecture, numerics={"alignment": "bitwise"}))
    engine.set_learning_rate(1e-3)
    for steps in (0, 2):
        for _ in range(steps):
            batch = random_batch([30, 41, 9], generator)
            engine.train_step([batch], nll, trained_tokens([batch]))
        batch, logits = forward(engine, lengths, generator)
        log_probs = engine.token_stats([batch])[0].log_probs
        bounds = batch.cu_seqlens.tolist()
        for index in (0, 1, 17, 40, 63):
            part = slice(bounds[index], bounds[index + 1])
            alone = random_batch([lengths[index]], generator)
            for field in ("token_ids", "targets", "loss_mask"):
                getattr(alone, field).copy_(getattr(batch, field)[part])
            with torch.no_grad():
                assert torch.equal(engine.logits(alone), logits[part]), (steps, index)
            assert torch.equal(engine.token_stats([alone])[0].log_probs, log_probs[part]), (steps, index)


def steps(architecture: str) -> None:
    """Five steps lower the loss; the bytes stay the quantized masters; a shadow pass is a BF16 trainer with the same operators."""
    generator = fresh_generator()
    engine = MegatronEngine(config(architecture, numerics={"alignment": "bitwise"}))
    engine.set_learning_rate(1e-3)
    batch, losses = random_batch([30, 41, 9], generator), []
    for _ in range(5):
        report = engine.train_step([batch], nll, trained_tokens([batch]))
        assert not report.skipped
        assert torch.isfinite(torch.tensor([report.grad_norm, report.metrics["loss"]])).all()
        losses.append(report.metrics["loss"])
    assert losses[-1] < losses[0], losses
    masters, fp8 = {name: master.cpu() for name, master in engine.named_masters()}, 0
    for name, tensor, scale_inv in engine.named_local_weights():
        if scale_inv is not None:
            fp8 += 1
            expected = quantize_blockwise(masters[name].bfloat16(), "e4m3", "128x128", power_2_scale=False)
            assert torch.equal(tensor.cpu().view(torch.uint8), expected.codes.view(torch.uint8)), name
            assert torch.equal(scale_inv.cpu(), expected.scale_inv), name
    assert fp8 == 2 * (2 + (8 if architecture == "qwen3_moe" else 2))
    shadow = engine.high_precision_token_stats([batch])[0].log_probs
    twin = MegatronEngine(config(architecture, "bf16", numerics={"alignment_overrides": choices_at("bitwise")}))
    twin.load_state_dict(engine.state_dict(), weights_only=True)
    assert torch.equal(twin.token_stats([batch])[0].log_probs, shadow)
    native = MegatronEngine(config(architecture))
    native.load_state_dict(engine.state_dict(), weights_only=True)
    assert {n: m.cpu() for n, m in native.named_masters()}.keys() != masters.keys()
    print("losses", losses)


def gradients(architecture: str) -> None:
    """Whole gradients against float64 are no worse than with native operators; linears in BF16, no choice of experts to make."""
    from references import qwen3_reference
    from test_shared_gradients import distance, exact_gradients, model_gradients

    qwen3_reference.PRECISION = torch.float64
    generator = fresh_generator()
    experts = {"num_experts": 2, "num_experts_per_tok": 2} if architecture == "qwen3_moe" else {}
    errors: dict[str, list[float]] = {"fast": [], "bitwise": []}
    engines = {
        level: MegatronEngine(
            config(architecture, "bf16", numerics={"alignment_overrides": choices_at(level)}, initializer_range=0.1, **experts)
        )
        for level in ("fast", "bitwise")
    }
    for _ in range(4):
        batch = random_batch([20, 33, 11], generator)
        for level, engine in engines.items():
            errors[level].append(distance(model_gradients(engine, batch), exact_gradients(engine, batch)))
    native, shared = (sum(values) / len(values) for values in errors.values())
    print("native", native, "shared", shared)
    assert shared < 1.1 * native, errors


def causes(architecture: str) -> None:
    """Each cause can be shared alone, and left native alone; log-probs stay close to the native trainer's."""
    generator = fresh_generator()
    batch = random_batch([20, 33, 11], generator)
    baseline = MegatronEngine(config(architecture)).token_stats([batch])[0].log_probs
    for name, cause in CAUSES.items():
        if cause.moe_only and architecture != "qwen3_moe":
            continue
        for level, choice in (("fast", "shared"), ("bitwise", "native")):
            engine = MegatronEngine(config(architecture, numerics={"alignment": level, "alignment_overrides": {name: choice}}))
            distance = float((engine.token_stats([batch])[0].log_probs - baseline).abs().mean())
            print(name, level, distance)
            assert distance < 0.05, (name, level, distance)
            report = engine.train_step([batch], nll, trained_tokens([batch]))
            assert not report.skipped


def experts(architecture: str) -> None:
    """With native choices the shared layer of grouped experts is Megatron's; it follows a routing replay; it shows what it computes."""
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    from e2e_fp8.training.shared_modules import SharedMoELayer

    generator = fresh_generator()
    engine = MegatronEngine(config(architecture, "bf16"))
    layer = engine.model.decoder.layers[0].mlp
    x, upstream = (torch.randn(128, 1, 256, generator=generator).bfloat16().cuda() for _ in range(2))
    results = []
    for shared in (False, True):
        if shared:
            layer.__class__, layer.shared = SharedMoELayer, set()
        leaf = x.clone().requires_grad_()
        out, _ = layer(leaf)
        out.backward(upstream)
        results.append((out.detach(), leaf.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])

    engine = MegatronEngine(config(architecture, numerics={"alignment": "bitwise"}))
    layer, logits = engine.model.decoder.layers[0].mlp, torch.randn(5, 4, generator=generator).cuda()
    replay, wanted = RouterReplay(), torch.tensor([[3, 0]] * 5, device="cuda")
    layer.router.router_replay = replay
    replay.set_target_indices(wanted)
    replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    weights, ids = layer.choose(logits)
    assert torch.equal(ids, wanted)
    assert torch.equal(weights, row_invariant.router_weights(logits, wanted, renormalize=True))
    layer.router.router_replay = None
    RouterReplay.global_router_replay_instances.clear()

    seen: list[dict[str, torch.Tensor]] = []
    layer.observe = seen.append
    forward(engine, [50, 7, 60], generator)
    (found,) = seen
    assert found["ids"].shape == (128, 2)
    assert found["gate_up"].shape == (256, 256)
    assert torch.equal(found["activation"], row_invariant.silu_and_mul(found["gate_up"]))
    assert found["down"].shape == (256, 256)


if __name__ == "__main__":
    check, architecture = sys.argv[1:]
    globals()[check](architecture)
    print("ok")
