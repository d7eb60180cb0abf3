"""Gradients of the shared operators: against float64 of the same formula, and of whole models no worse than with native operators."""

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from references import qwen3_reference
from training_cases import fresh_generator, nll, random_batch, small_config, trained_tokens

from e2e_fp8.config.alignment import choices_at
from e2e_fp8.config.hf import to_hf_config
from e2e_fp8.export.hf_names import to_hf
from e2e_fp8.numerics.row_invariant import rotary_table, router_weights
from e2e_fp8.training.attention import sdpa_packed
from e2e_fp8.training.engine import MegatronEngine
from e2e_fp8.training.microbatches import even_out
from e2e_fp8.training.shared_functions import (
    SharedAttention,
    SharedCombine,
    SharedMatmul,
    SharedRmsNorm,
    SharedRotary,
    SharedRouterWeights,
    SharedSwiglu,
)
from e2e_fp8.training.shared_modules import SharedMoELayer

BF16_HALF_STEP = 2.0**-8
FP32_STEP = 2.0**-23
EPSILON = 1e-6


@pytest.fixture
def generator():
    return fresh_generator()


def leaf(generator, *shape, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=generator).to(dtype).requires_grad_()


def gradients(function, leaves, upstream, dtype=None):
    """Gradients of ``sum(function(leaves) * upstream)``, the leaves in their own dtype or in ``dtype``."""
    taken = [x.detach().to(dtype or x.dtype).requires_grad_() for x in leaves]
    out = function(*taken)
    return torch.autograd.grad(out, taken, upstream.to(out.dtype))


def assert_rounded_once(found, exact, terms, magnitude):
    """FP32 sums of ``terms`` terms of at most ``magnitude``, then one rounding to the dtype of ``found``."""
    step = BF16_HALF_STEP if found.dtype == torch.bfloat16 else FP32_STEP
    slack = 4 * terms * FP32_STEP * float(magnitude)
    error = (found.double() - exact).abs()
    assert bool((error <= 1.01 * step * exact.abs() + slack).all()), float((error - step * exact.abs()).max())


def test_rms_norm(generator):
    x, weight, upstream = leaf(generator, 6, 128), leaf(generator, 128), torch.randn(6, 128, generator=generator).bfloat16()
    found = gradients(lambda a, w: SharedRmsNorm.apply(a, w, EPSILON), (x, weight), upstream)
    exact = gradients(lambda a, w: F.rms_norm(a, (128,), w, EPSILON), (x, weight), upstream, torch.float64)
    inverse = x.detach().double().square().mean(-1).rsqrt().max()
    normed = (x.detach().double() * x.detach().double().square().mean(-1, keepdim=True).rsqrt()).abs().max()
    magnitude = (upstream.double().abs().max() * weight.detach().double().abs().max()) * (1 + normed * normed)
    assert_rounded_once(found[0], exact[0], 128, inverse * magnitude)
    assert_rounded_once(found[1], exact[1], 6, upstream.double().abs().max() * normed)


def test_swiglu(generator):
    gate_up, upstream = leaf(generator, 6, 64), torch.randn(6, 32, generator=generator).bfloat16()

    def exactly(x):
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    found, exact = gradients(SharedSwiglu.apply, (gate_up,), upstream), gradients(exactly, (gate_up,), upstream, torch.float64)
    magnitude = upstream.double().abs().max() * gate_up.detach().double().abs().max() * 4
    assert_rounded_once(found[0], exact[0], 4, magnitude)


def test_rotary(generator):
    x, upstream = leaf(generator, 5, 2, 16), torch.randn(5, 2, 16, generator=generator).bfloat16()
    cos, sin = (t[torch.tensor([0, 3, 9, 1, 40])] for t in rotary_table(10_000.0, 16, 64))

    def exactly(x):
        first, second = x.chunk(2, -1)
        c, s = cos.double()[:, None], sin.double()[:, None]
        return torch.cat([first * c - second * s, second * c + first * s], -1)

    found = gradients(lambda a: SharedRotary.apply(a, cos, sin), (x,), upstream)
    exact = gradients(exactly, (x,), upstream, torch.float64)
    assert_rounded_once(found[0], exact[0], 2, upstream.double().abs().max())


@pytest.mark.parametrize("lengths", [((4, 4), (9, 9), (4, 4)), ((3, 8), (9, 9), (4, 4)), ((5, 17),)])
def test_attention_has_the_gradient_of_torch(lengths, generator):
    queries, keys = (sum(sizes) for sizes in zip(*lengths, strict=True))
    leaves = [leaf(generator, queries, 4, 32), leaf(generator, keys, 2, 32), leaf(generator, keys, 2, 32)]
    upstream = torch.randn(queries, 4, 32, generator=generator).bfloat16()
    found = gradients(lambda q, k, v: SharedAttention.apply(q, k, v, lengths, 32**-0.5, sdpa_packed), leaves, upstream)
    native = gradients(lambda q, k, v: sdpa_packed(q, k, v, lengths, 32**-0.5), leaves, upstream)
    for shared, torchs in zip(found, native, strict=True):
        assert torch.equal(shared, torchs)


def test_router_and_head_products(generator):
    x, weight, upstream = leaf(generator, 7, 64), leaf(generator, 5, 64), torch.randn(7, 5, generator=generator)
    found = gradients(SharedMatmul.apply, (x, weight), upstream)
    exact = gradients(lambda a, w: a @ w.t(), (x, weight), upstream, torch.float64)
    for shared, reference in zip(found, exact, strict=True):
        assert_rounded_once(shared, reference, 7, upstream.abs().max() * 4)


def test_combine(generator):
    outputs, weights = leaf(generator, 15, 32), torch.rand(5, 3, generator=generator).requires_grad_()
    rows, upstream = torch.randperm(15, generator=generator).view(5, 3), torch.randn(5, 32, generator=generator).bfloat16()

    def exactly(x, w):
        return (x[rows] * w[..., None]).sum(1)

    found = gradients(lambda x, w: SharedCombine.apply(x, w, rows), (outputs, weights), upstream)
    exact = gradients(exactly, (outputs, weights), upstream, torch.float64)
    assert_rounded_once(found[0], exact[0], 1, upstream.double().abs().max())
    assert_rounded_once(found[1], exact[1], 32, upstream.double().abs().max() * outputs.detach().double().abs().max())


@pytest.mark.parametrize("renormalize", [True, False])
def test_router_weights(renormalize, generator):
    logits, upstream = leaf(generator, 9, 6, dtype=torch.float32), torch.randn(9, 3, generator=generator)
    ids = logits.detach().topk(3, -1).indices

    def exactly(z):
        probabilities = z.softmax(-1).gather(1, ids)
        return probabilities / probabilities.sum(-1, keepdim=True) if renormalize else probabilities

    found = gradients(lambda z: SharedRouterWeights.apply(z, ids, renormalize), (logits,), upstream)
    exact = gradients(exactly, (logits,), upstream, torch.float64)
    assert_rounded_once(found[0], exact[0], 6, upstream.abs().max())


def test_the_expert_layer_with_native_choices_is_megatrons(generator):
    """So that one cause can be switched while the others stay as they are without this layer."""
    for renormalize in (True, False):
        engine = MegatronEngine(small_config("qwen3_moe", norm_topk_prob=renormalize))
        layer = engine.model.decoder.layers[0].mlp
        x = torch.randn(31, 1, 128, generator=generator).bfloat16()
        upstream = torch.randn(31, 1, 128, generator=generator).bfloat16()
        results = []
        for shared in (False, True):
            if shared:
                layer.__class__, layer.shared = SharedMoELayer, set()
            leaf = x.clone().requires_grad_()
            with engine.ground.scope():
                out, _ = layer(leaf)
                out.backward(upstream)
            results.append((out.detach(), leaf.grad))
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])


def test_the_shared_expert_layer_follows_a_routing_replay(generator):
    engine = MegatronEngine(small_config("qwen3_moe", numerics={"alignment": "bitwise"}))
    layer, logits = engine.model.decoder.layers[0].mlp, torch.randn(5, 4, generator=generator)
    replay = RouterReplay()
    try:
        layer.router.router_replay = replay
        wanted = torch.tensor([[3, 0]] * 5)
        replay.set_target_indices(wanted)
        replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        weights, ids = layer.choose(logits)
    finally:
        RouterReplay.global_router_replay_instances.remove(replay)
    assert torch.equal(ids, wanted)
    assert torch.equal(weights, router_weights(logits, wanted, renormalize=True))


def model_gradients(engine, batch):
    """HF name -> float64 gradient of the mean negative log-likelihood."""
    with engine.ground.scope():
        engine._wrapped[0].zero_grad_buffer()
        engine._accumulate_gradients(even_out([batch]), nll, trained_tokens([batch]))
    entries = ((p.name, p.weight.main_grad.float(), None) for p in engine._parameters)
    return {entry.name: entry.tensor.double().cpu() for entry in to_hf(entries, engine.cfg.model)}


def exact_gradients(engine, batch):
    """The same of the float64 model with the BF16 weights that the engine computes with."""
    weights = {e.name: e.tensor.double().cpu().requires_grad_() for e in to_hf(engine.named_local_weights(), engine.cfg.model)}
    config, total = to_hf_config(engine.cfg.model, None), torch.zeros((), dtype=torch.float64)
    for first, last in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
        logits, _ = qwen3_reference.forward(config, weights, batch.token_ids[first:last].tolist())
        log_probs = logits.log_softmax(-1).gather(1, batch.targets[first:last, None])[:, 0]
        total = total - (log_probs * batch.loss_mask[first:last]).sum()
    found = torch.autograd.grad(total / trained_tokens([batch]), list(weights.values()), materialize_grads=True)
    return dict(zip(weights, found, strict=True))


def distance(found, exact):
    """Relative L2 distance over all weights."""
    missed = sum(float((found[name] - exact[name]).square().sum()) for name in exact)
    return (missed / sum(float(g.square().sum()) for g in exact.values())) ** 0.5


def gradient_errors(architecture, generator):
    """Relative L2 error of the whole gradient with native and with shared operators, linears in BF16.

    Both experts of a token's two are chosen, so that no rounding can change the choice, which float64 could not follow.
    """
    batch, errors = random_batch([20, 33, 11], generator), []
    experts = {"num_experts": 2, "num_experts_per_tok": 2} if architecture == "qwen3_moe" else {}
    for level in ("fast", "bitwise"):
        numerics = {"alignment_overrides": choices_at(level)}
        engine = MegatronEngine(small_config(architecture, "bf16", numerics=numerics, initializer_range=0.1, **experts))
        errors.append(distance(model_gradients(engine, batch), exact_gradients(engine, batch)))
    return errors


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_whole_gradients_are_no_worse_than_with_native_operators(architecture, generator, monkeypatch):
    """The two errors are of one size, that of BF16 products, and vary by some 5 % (dense) with the tokens: 1.25 is five such steps."""
    monkeypatch.setattr(qwen3_reference, "PRECISION", torch.float64)
    native, shared = gradient_errors(architecture, generator)
    print("native", native, "shared", shared)
    assert shared < 1.25 * native
