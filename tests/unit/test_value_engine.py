"""The critic on the CPU: it fits returns, its head is FP32, a resume repeats every bit, and the policy beside it does not move."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from training_cases import VOCAB, fresh_generator, nll, random_batch, small_config, trained_tokens

from e2e_fp8.config.critic import CriticConfig
from e2e_fp8.config.hf import to_hf_config
from e2e_fp8.errors import CheckpointError
from e2e_fp8.numerics.blockwise import quantize_blockwise
from e2e_fp8.training.engine import MegatronEngine
from e2e_fp8.training.value_engine import ValueEngine
from e2e_fp8.training.weights import initial_hf_weights
from e2e_fp8.update.value import make_value_loss_fn

LOSS = make_value_loss_fn(CriticConfig(value_clip=None))


def gae_config(architecture: str = "qwen3_moe", **critic):
    cfg = small_config(architecture)
    objective = cfg.objective.model_copy(update={"advantage": "gae", "critic": CriticConfig(**critic)})
    return cfg.model_copy(update={"objective": objective})


def critic_of(cfg) -> ValueEngine:
    critic = ValueEngine(cfg)
    if critic.cfg.model.hf_path is None:
        critic.start_from(MegatronEngine(cfg).named_masters())
    critic.set_learning_rate(1e-3)
    return critic


def value_batch(lengths, generator):
    batch = random_batch(lengths, generator)
    returns = torch.randn(batch.token_ids.numel(), generator=generator)
    return replace(batch, returns=returns * batch.loss_mask, values=torch.zeros_like(returns))


def train(critic, batches, count):
    return [critic.train_step(batches, LOSS, trained_tokens(batches)) for _ in range(count)]


def state_bytes(engine):
    return {name: {k: v.clone() for k, v in entry.items()} for name, entry in engine.state_dict()["parameters"].items()}


def assert_same(left, right):
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].keys() == right[name].keys()
        for key in left[name]:
            assert torch.equal(left[name][key], right[name][key]), (name, key)


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_it_fits_a_fixed_batch_of_returns(architecture, precision):
    """40 random numbers, far fewer than the weights. No token comes twice: to rotary attention "a" and "a a" are the same context."""
    critic = critic_of(gae_config(architecture, precision=precision))
    generator = fresh_generator()
    batch = replace(value_batch([9, 20, 1, 14], generator), token_ids=torch.randperm(VOCAB, generator=generator)[:44])
    reports = train(critic, [batch], 40)
    losses = [r.metrics["critic/vf_loss"] for r in reports]
    assert losses[0] == pytest.approx(float((batch.returns**2).sum() / 2 / batch.loss_mask.sum()), rel=1e-6)
    assert min(losses[-10:]) < 0.05 * losses[0]
    assert critic.policy_version == 40
    assert not any(r.skipped for r in reports)
    masters, fp8 = dict(critic.named_masters()), 0
    for name, tensor, scale_inv in critic.named_local_weights():
        if scale_inv is not None:
            fp8 += 1
            expected = quantize_blockwise(masters[name].bfloat16(), "e4m3", "128x128", power_2_scale=False)
            assert torch.equal(tensor.view(torch.uint8), expected.codes.view(torch.uint8)), name
    assert fp8 == (0 if precision == "bf16" else 2 * (2 + (8 if architecture == "qwen3_moe" else 2)))


def test_it_starts_as_the_policy_with_values_of_zero():
    cfg = gae_config()
    policy = MegatronEngine(cfg)
    policy.set_learning_rate(1e-3)
    batch = random_batch([12, 7], fresh_generator())
    policy.train_step([batch], nll, trained_tokens([batch]))
    critic = ValueEngine(cfg)
    critic.start_from(policy.named_masters())
    masters = dict(policy.named_masters())
    for name, master in critic.named_masters():
        expected = torch.zeros(1, 128) if name == "output_layer.weight" else masters[name]
        assert torch.equal(master, expected), name
    values = critic.values([batch])[0]
    assert values.dtype == torch.float32
    assert torch.equal(values, torch.zeros(19))


def test_head_weight_product_and_output_are_fp32():
    critic = critic_of(gae_config())
    batch = value_batch([12, 7, 1], fresh_generator())
    train(critic, [batch], 3)
    head = critic.model.output_layer
    assert head.weight.dtype == torch.float32
    assert not torch.equal(head.weight, head.weight.bfloat16().float())
    assert torch.equal(head.weight, dict(critic.named_masters())["output_layer.weight"])
    seen = []
    with head.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0])):
        values = critic.values([batch])[0]
    assert seen[0].dtype == torch.bfloat16
    expected = seen[0][:, 0].double() @ head.weight[0].double()
    # 128 products and 127 sums in FP32, each rounding by 2^-24 of the magnitudes so far: any order of summation is within this
    bound = 130 * 2.0**-24 * (seen[0][:, 0].double().abs() @ head.weight[0].double().abs())
    assert ((values - expected).abs() <= bound).all()


def test_micro_batches_give_values_of_their_own_and_one_step():
    generator = fresh_generator()
    batches = [value_batch([10, 21], generator), value_batch([17], generator)]
    one = critic_of(gae_config("qwen3"))
    train(one, batches, 2)
    together, alone = one.values(batches), [one.values([b])[0] for b in batches]
    assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))


def test_resume_is_bit_exact_and_the_policy_beside_it_does_not_move():
    generator = fresh_generator()
    batches = [value_batch([10, 21], generator), value_batch([17], generator)]
    cfg = gae_config()
    policy = MegatronEngine(cfg)
    before = state_bytes(policy)
    straight = critic_of(cfg)
    train(straight, batches, 2)
    state = straight.state_dict()
    last = train(straight, batches, 1)
    resumed = ValueEngine(cfg)
    resumed.load_state_dict(state)
    resumed.set_learning_rate(1e-3)
    assert train(resumed, batches, 1) == last
    assert_same(state_bytes(straight), state_bytes(resumed))
    assert {"master", "exp_avg", "exp_avg_sq"} <= state["parameters"]["output_layer.weight"].keys()
    assert_same(before, state_bytes(policy))
    with pytest.raises(CheckpointError, match=r"output_layer.weight has 128 elements, but the trainer's has 8192"):
        policy.load_state_dict(state)


@pytest.mark.parametrize("tied", [False, True])
def test_it_starts_from_a_checkpoint_with_or_without_a_head(tmp_path, tied):
    cfg = gae_config("qwen3", hf_path=str(tmp_path))
    weights = initial_hf_weights(cfg.model.model_copy(update={"tie_word_embeddings": tied}), seed=5)
    head = torch.randn(1, 128)
    (tmp_path / "config.json").write_text(json.dumps(to_hf_config(cfg.model, None)))
    save_file({**weights, "score.weight": head}, tmp_path / "model.safetensors")
    masters = dict(critic_of(cfg).named_masters())
    assert torch.equal(masters["output_layer.weight"], head)
    assert torch.equal(masters["embedding.word_embeddings.weight"], weights["model.embed_tokens.weight"])
    save_file(weights, tmp_path / "model.safetensors")
    assert torch.equal(dict(critic_of(cfg).named_masters())["output_layer.weight"], torch.zeros(1, 128))


def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path):
    cfg = gae_config("qwen3", hf_path=str(tmp_path))
    weights = initial_hf_weights(cfg.model, seed=5)
    save_file({**weights, "score.weight": torch.zeros(3, 128)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"score.weight has shape \(3, 128\), but a critic has one value per token"):
        ValueEngine(cfg)
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing .*model\.norm\.weight"):
        ValueEngine(cfg)


def test_a_tied_policy_lends_its_weights_too():
    cfg = small_config("qwen3", tie_word_embeddings=True).model_copy(update={"objective": gae_config().objective})
    critic, masters = critic_of(cfg), dict(MegatronEngine(cfg).named_masters())
    batch = value_batch([8, 5], fresh_generator())
    started = {name: master.clone() for name, master in critic.named_masters()}
    assert started.keys() == masters.keys() | {"output_layer.weight"}
    assert all(torch.equal(started[name], masters[name]) for name in masters)
    assert not any(r.skipped for r in train(critic, [batch], 2))
    assert all(not torch.equal(started[name], master) for name, master in critic.named_masters() if master.dim() == 2)
