"""The trainer on the CPU: it learns, its FP8 bytes are those of its masters, and a resume repeats every bit."""

import math

import pytest
import torch
from training_cases import fresh_generator, nll, random_batch, small_config, trained_tokens

from e2e_fp8.errors import CheckpointError, ConfigError
from e2e_fp8.numerics.blockwise import quantize_blockwise
from e2e_fp8.training.engine import MegatronEngine
from e2e_fp8.training.weights import hf_shapes, initial_hf_weights

BOTH = pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])


@pytest.fixture
def generator():
    return fresh_generator()


def steps(engine, batches, count):
    reports = [engine.train_step(batches, nll, trained_tokens(batches)) for _ in range(count)]
    return [r.metrics["loss"] for r in reports]


def all_bytes(engine):
    found = {}
    for name, tensor, scale_inv in engine.named_local_weights():
        found[name] = tensor.view(torch.uint8).clone()
        if scale_inv is not None:
            found[name + "_scale_inv"] = scale_inv.clone()
    return found


def assert_same(left, right):
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


@BOTH
@pytest.mark.parametrize("scale_format", ["fp32", "pow2"])
def test_loss_falls_and_fp8_bytes_are_the_quantized_masters(architecture, scale_format, generator):
    engine = MegatronEngine(small_config(architecture, numerics={"scale_format": scale_format}))
    engine.set_learning_rate(3e-3)
    batch = random_batch([9, 30, 9, 1, 14], generator)
    losses = steps(engine, [batch], 6)
    assert losses[-1] < losses[0] - 1.0
    assert engine.policy_version == 6
    masters, fp8_names = dict(engine.named_masters()), set()
    for name, tensor, scale_inv in engine.named_local_weights():
        if scale_inv is None:
            assert tensor.dtype == torch.bfloat16
            assert torch.equal(tensor, masters[name].bfloat16()), name
            continue
        fp8_names.add(name)
        expected = quantize_blockwise(masters[name].bfloat16(), "e4m3", "128x128", power_2_scale=scale_format == "pow2")
        assert torch.equal(tensor.view(torch.uint8), expected.codes.view(torch.uint8)), name
        assert torch.equal(scale_inv, expected.scale_inv), name
    linears = 2 * (2 + (2 * 4 if architecture == "qwen3_moe" else 2))
    assert len(fp8_names) == linears


@BOTH
def test_masters_start_as_the_unrounded_initial_weights(architecture):
    cfg = small_config(architecture)
    weights = initial_hf_weights(cfg.model, cfg.run.seed)
    masters = dict(MegatronEngine(cfg).named_masters())
    assert torch.equal(masters["embedding.word_embeddings.weight"], weights["model.embed_tokens.weight"])
    assert torch.equal(masters["decoder.layers.1.self_attention.linear_proj.weight"], weights["model.layers.1.self_attn.o_proj.weight"])
    assert sum(m.numel() for m in masters.values()) == sum(math.prod(shape) for _, shape in hf_shapes(cfg.model))


@BOTH
def test_micro_batches_accumulate_to_one_batch(architecture, generator):
    lengths = [12, 20, 7]
    whole = random_batch(lengths, generator)
    parts = [split_sequence(whole, i) for i in range(len(lengths))]
    engines = [MegatronEngine(small_config(architecture, "bf16")) for _ in range(2)]
    for engine in engines:
        engine.set_learning_rate(1e-3)
    one = engines[0].train_step([whole], nll, trained_tokens([whole]))
    many = engines[1].train_step(parts, nll, trained_tokens(parts))
    assert one.metrics["loss"] == pytest.approx(many.metrics["loss"], rel=2e-4)
    assert one.metrics["entropy"] == pytest.approx(many.metrics["entropy"], rel=2e-4)
    assert one.grad_norm == pytest.approx(many.grad_norm, rel=2e-2)
    # A wrong denominator or a dropped micro-batch would be off by a factor, not by rounding.
    left = torch.cat([m.flatten() for _, m in engines[0].named_masters()])
    right = torch.cat([m.flatten() for _, m in engines[1].named_masters()])
    start = torch.cat([m.flatten() for _, m in MegatronEngine(small_config(architecture, "bf16")).named_masters()])
    assert (left - right).norm() < 0.2 * (left - start).norm()


def split_sequence(batch, index):
    from dataclasses import replace

    first, last = int(batch.cu_seqlens[index]), int(batch.cu_seqlens[index + 1])
    names = ("token_ids", "position_ids", "targets", "loss_mask", "advantages", "rollout_log_probs", "old_log_probs")
    cut = {name: getattr(batch, name)[first:last] for name in names}
    return replace(batch, cu_seqlens=torch.tensor([0, last - first], dtype=torch.int32), **cut)


@BOTH
def test_resume_is_bit_exact(architecture, generator):
    batches = [random_batch([10, 21], generator), random_batch([17], generator)]
    straight = MegatronEngine(small_config(architecture))
    straight.set_learning_rate(2e-3)
    steps(straight, batches, 2)
    state = straight.state_dict()
    last = steps(straight, batches, 1)

    other = small_config(architecture).model_copy(update={"run": small_config().run.model_copy(update={"seed": 99})})
    resumed = MegatronEngine(other)
    resumed.load_state_dict(state)
    resumed.set_learning_rate(2e-3)
    assert resumed.policy_version == 2
    assert steps(resumed, batches, 1) == last
    assert_same(all_bytes(straight), all_bytes(resumed))
    left, right = straight.state_dict(), resumed.state_dict()
    for name, entry in left["parameters"].items():
        assert entry.keys() == right["parameters"][name].keys()
        assert {"master", "exp_avg", "exp_avg_sq"} <= entry.keys()
        assert_same(entry, right["parameters"][name])


def test_state_is_a_copy(generator):
    engine = MegatronEngine(small_config())
    engine.set_learning_rate(1e-2)
    steps(engine, [random_batch([8], generator)], 1)
    state = engine.state_dict()
    before = {n: e["exp_avg"].clone() for n, e in state["parameters"].items()}
    steps(engine, [random_batch([8], generator)], 1)
    assert all(torch.equal(before[n], state["parameters"][n]["exp_avg"]) for n in before)


def test_foreign_state_is_refused():
    engine = MegatronEngine(small_config())
    state = engine.state_dict()
    del state["parameters"]["output_layer.weight"]
    with pytest.raises(CheckpointError, match="output_layer"):
        engine.load_state_dict(state)
    with pytest.raises(CheckpointError, match="rng"):
        engine.load_state_dict({"parameters": {}})


def test_non_finite_gradient_skips_the_step(generator):
    engine = MegatronEngine(small_config())
    batch = random_batch([8, 5], generator)
    steps(engine, [batch], 1)
    before = all_bytes(engine)

    def poisoned(stats, micro):
        loss, metrics = nll(stats, micro)
        return loss * torch.tensor(float("nan")), metrics

    report = engine.train_step([batch], poisoned, 1.0)
    assert report.skipped
    assert engine.policy_version == 1
    assert_same(before, all_bytes(engine))
    assert not engine.train_step([batch], nll, 11.0).skipped


def test_fp8_forward_differs_from_bf16_but_not_much(generator):
    batch = random_batch([24, 16], generator)
    fp8 = MegatronEngine(small_config("qwen3", "fp8")).token_stats([batch])[0].log_probs
    bf16 = MegatronEngine(small_config("qwen3", "bf16")).token_stats([batch])[0].log_probs
    difference = (fp8 - bf16).abs()
    assert 1e-5 < difference.mean() < 0.2


def test_stale_codes_are_refused(generator):
    engine = MegatronEngine(small_config("qwen3"))
    with torch.no_grad():
        engine.model.decoder.layers[0].mlp.linear_fc2.weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="older than the weight"):
        engine.token_stats([random_batch([8], generator)])


def test_torch_cuda_is_untouched_outside_the_engine(generator):
    names = ("current_device", "Stream", "Event", "current_stream", "stream", "get_rng_state", "manual_seed", "synchronize")
    before = {name: getattr(torch.cuda, name) for name in names}
    engine = MegatronEngine(small_config())
    steps(engine, [random_batch([8], generator)], 1)
    assert {name: getattr(torch.cuda, name) for name in names} == before
    assert torch.zeros(1).type() == "torch.FloatTensor"


def test_one_linear_can_stay_in_bf16(generator):
    patterns = (*small_config().numerics.high_precision_modules, "model.layers.0.self_attn.o_proj")
    engine = MegatronEngine(small_config("qwen3", numerics={"high_precision_modules": patterns}))
    kinds = {name: scale_inv is not None for name, _, scale_inv in engine.named_local_weights()}
    assert not kinds["decoder.layers.0.self_attention.linear_proj.weight"]
    assert kinds["decoder.layers.1.self_attention.linear_proj.weight"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"training": {"parallel": {"pipeline": 2}}}, "1 rank, which is not a multiple of tensor x context x pipeline = 2"),
        ({"training": {"parallel": {"expert": 4}}}, "expert_tensor x expert x pipeline = 4 .*training.parallel.expert 4"),
        ({"model": {"hidden_size": 192}}, "multiple of 128"),
        ({"model": {"num_experts_per_tok": 1}}, "num_experts_per_tok"),
        ({"model": {"num_experts_per_tok": 16}}, "num_experts_per_tok"),
        ({"model": {"num_attention_heads": 3, "num_key_value_heads": 2}}, "num_attention_heads"),
        ({"numerics": {"high_precision_modules": ["lm_head", "model.*norm", "model.embed_tokens", "*.mlp.gate", "*.q_proj"]}}, "q_proj"),
        ({"numerics": {"high_precision_modules": ["*"]}}, "no linear in FP8"),
        ({"run": {"backend": "cuda"}}, "no GPU"),
    ],
)
def test_unsupported_configurations_are_refused(change, message):
    from e2e_fp8.config.root import Config

    if "backend" in change.get("run", {}) and torch.cuda.is_available():
        pytest.skip("a GPU is present")
    base = small_config().model_dump()
    for section, values in change.items():
        base[section] = {**base[section], **values}
    with pytest.raises(ConfigError, match=message):
        MegatronEngine(Config.model_validate(base))


def test_empty_step_is_refused():
    engine = MegatronEngine(small_config("qwen3"))
    with pytest.raises(ValueError, match="micro-batches"):
        engine.train_step([], nll, 1.0)
