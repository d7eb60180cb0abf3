"""Packed attention, Hugging Face import, and agreement of the whole model with transformers."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from training_cases import fresh_generator, random_batch, small_config

from e2e_fp8.errors import CheckpointError
from e2e_fp8.megatron_names import hf_sources, neutral_name
from e2e_fp8.training.attention import sdpa_packed
from e2e_fp8.training.engine import MegatronEngine
from e2e_fp8.training.head import Fp32LogitsFunction
from e2e_fp8.training.weights import hf_shapes, import_safetensors, initial_hf_weights

SHAPES = {
    "qwen3": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
    "qwen3_moe": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
}


@pytest.fixture
def generator():
    return fresh_generator()


def slow_attention(q, k, v, lengths):
    """Row by row in float64."""
    out, start, repeat = [], 0, q.size(1) // k.size(1)
    for length in lengths:
        for t in range(start, start + length):
            row = []
            for head in range(q.size(1)):
                keys, values = k[start : t + 1, head // repeat].double(), v[start : t + 1, head // repeat].double()
                row.append(torch.softmax(keys @ q[t, head].double() / math.sqrt(q.size(2)), dim=0) @ values)
            out.append(torch.stack(row))
        start += length
    return torch.stack(out)


@settings(max_examples=15, deadline=None)
@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5), groups=st.sampled_from([1, 2, 4]))
def test_packed_attention_stays_inside_sequences(lengths, groups):
    total = sum(lengths)
    q, k, v = torch.randn(total, 4, 8), torch.randn(total, groups, 8), torch.randn(total, groups, 8)
    out = sdpa_packed(q, k, v, tuple(zip(lengths, lengths, strict=True)), 1 / math.sqrt(8))
    torch.testing.assert_close(out.double(), slow_attention(q, k, v, lengths), rtol=1e-4, atol=1e-5)


def hf_model(cfg, weights, dtype):
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    m = cfg.model
    common = dict(m.model_dump(exclude={"architecture", "hf_path", "rope_theta", "vocab_size"}), vocab_size=m.vocab_size)
    common |= {
        "rope_theta": m.rope_theta,
        "attention_bias": False,
        "attn_implementation": "eager",
        "bos_token_id": None,
        "eos_token_id": None,
    }
    config_class, model_class = (Qwen3MoeConfig, Qwen3MoeForCausalLM) if m.is_moe else (Qwen3Config, Qwen3ForCausalLM)
    model = model_class(config_class(**common)).eval()
    state = dict(weights)
    if m.is_moe:
        state = stack_experts(state, model.state_dict(), m)
    if m.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict({n: t.bfloat16().float() for n, t in state.items()}, strict=True)
    return model.to(dtype)


def stack_experts(state, wanted, m):
    """transformers 5 keeps all experts of a layer in two tensors; older releases one by one."""
    if not any(name.endswith("experts.gate_up_proj") for name in wanted):
        return state
    kept = {n: t for n, t in state.items() if ".experts." not in n}
    for layer in range(m.num_hidden_layers):
        prefix = f"model.layers.{layer}.mlp.experts."
        each = [{p: state[f"{prefix}{e}.{p}_proj.weight"] for p in ("gate", "up", "down")} for e in range(m.num_experts)]
        kept[prefix + "gate_up_proj"] = torch.stack([torch.cat([w["gate"], w["up"]]) for w in each])
        kept[prefix + "down_proj"] = torch.stack([w["down"] for w in each])
    return kept


@pytest.mark.parametrize(
    ("architecture", "extra"),
    [
        ("qwen3", {}),
        ("qwen3", {"tie_word_embeddings": True, "rope_theta": 10_000.0}),
        ("qwen3_moe", {}),
        ("qwen3_moe", {"norm_topk_prob": False, "num_experts_per_tok": 3}),
        ("qwen3_moe", {"norm_topk_prob": False, "num_experts_per_tok": 1}),
    ],
)
def test_logits_agree_with_transformers(architecture, extra, generator):
    cfg = small_config(architecture, "bf16", **SHAPES[architecture], **extra)
    engine = MegatronEngine(cfg)
    weights = initial_hf_weights(cfg.model, 3)
    for tensor in weights.values():
        if tensor.dim() == 1:
            tensor.copy_(1 + 0.3 * torch.randn(tensor.shape, generator=generator))
    engine.load_hf_weights(weights)
    lengths = [19, 8, 1, 19, 5, 6, 7, 5, 6, 7]
    batch = random_batch(lengths, generator)
    with torch.no_grad():
        ours = engine.logits(batch)
        exact, rounded = (
            torch.cat([hf_model(cfg, weights, dtype)(part[None]).logits[0].float() for part in batch.token_ids.split(lengths)])
            for dtype in (torch.float32, torch.bfloat16)
        )
    assert ours.dtype == torch.float32
    assert ours.shape == (sum(lengths), cfg.model.vocab_size)
    spread, noise, error = exact.std(), (rounded - exact).abs().mean(1).median(), (ours - exact).abs().mean(1).median()
    # Both BF16 models stray from the FP32 one by rounding; a wrong head order, rope or router strays by the spread itself.
    # The median over tokens, because rounding may send a token to another expert and change its sequence.
    assert noise < 0.05 * spread
    assert error < 1.5 * noise


def test_sequences_do_not_see_each_other(generator):
    engine = MegatronEngine(small_config("qwen3", "fp8"))
    first, second = random_batch([13], generator), random_batch([9], generator)
    both = random_batch([13, 9], generator)
    both.token_ids.copy_(torch.cat([first.token_ids, second.token_ids]))
    with torch.no_grad():
        alone = torch.cat([engine.logits(first), engine.logits(second)])
        packed = engine.logits(both)
    torch.testing.assert_close(packed, alone, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_every_parameter_has_its_sources_exactly_once(architecture):
    cfg = small_config(architecture)
    names = [name for name, _ in MegatronEngine(cfg).named_masters()]
    used = [source for name in names for source in hf_sources(name)]
    assert sorted(used) == sorted(name for name, _ in hf_shapes(cfg.model))
    assert hf_sources("decoder.layers.3.mlp.experts.linear_fc1.weight7") == hf_sources(
        "decoder.layers.3.mlp.experts.local_experts.7.linear_fc1.weight"
    )


def write_sharded(folder, weights):
    names = sorted(weights)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in shards.items():
        save_file({n: weights[n] for n in members}, folder / file)
    index = {"weight_map": {n: file for file, members in shards.items() for n in members}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return shards


def test_sharded_directory_round_trip(tmp_path):
    cfg = small_config("qwen3")
    weights = initial_hf_weights(cfg.model, 5)
    write_sharded(tmp_path, weights)
    read = import_safetensors(tmp_path)
    assert read.keys() == weights.keys()
    assert all(torch.equal(read[n], weights[n]) for n in weights)
    engine = MegatronEngine(cfg)
    engine.load_hf_weights(read)
    masters = dict(engine.named_masters())
    assert torch.equal(masters["decoder.layers.0.mlp.linear_fc2.weight"], weights["model.layers.0.mlp.down_proj.weight"])


def test_damaged_directories_name_the_file(tmp_path):
    weights = initial_hf_weights(small_config("qwen3").model, 5)
    shards = write_sharded(tmp_path, weights)
    whole = (tmp_path / "b.safetensors").read_bytes()
    (tmp_path / "b.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=r"b\.safetensors is truncated"):
        import_safetensors(tmp_path)
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"b\.safetensors is missing.*" + shards["b.safetensors"][0].replace(".", r"\.")):
        import_safetensors(tmp_path)
    save_file({"stranger": torch.zeros(1)}, tmp_path / "b.safetensors")
    with pytest.raises(CheckpointError, match="lacks"):
        import_safetensors(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(CheckpointError, match="index"):
        import_safetensors(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match="neither"):
        import_safetensors(tmp_path)


def test_weights_that_do_not_fit_are_refused():
    cfg = small_config("qwen3")
    engine = MegatronEngine(cfg)
    weights = initial_hf_weights(cfg.model, 1)
    wrong = dict(weights, **{"model.norm.weight": torch.ones(7)})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has shape \(7,\)"):
        engine.load_hf_weights(wrong)
    del wrong["model.norm.weight"]
    with pytest.raises(CheckpointError, match=r"missing \['model\.norm\.weight'\]"):
        engine.load_hf_weights(wrong)
    bad = dict(weights, **{"model.norm.weight": torch.full((128,), float("nan"))})
    with pytest.raises(CheckpointError, match="NaN"):
        engine.load_hf_weights(bad)
    with pytest.raises(CheckpointError, match="float8"):
        engine.load_hf_weights(dict(weights, **{"lm_head.weight": weights["lm_head.weight"].to(torch.float8_e4m3fn)}))


def test_head_gives_fp32_logits_of_bf16_operands():
    x, w = torch.randn(9, 64).bfloat16().requires_grad_(), torch.randn(17, 64).bfloat16().requires_grad_()
    logits = Fp32LogitsFunction.apply(x, w, False)
    assert logits.dtype == torch.float32
    exact = x.detach().double() @ w.detach().double().t()
    torch.testing.assert_close(logits.detach().double(), exact, rtol=1e-5, atol=1e-4)
    # BF16 output would miss this bound by two orders of magnitude.
    assert (logits.detach().bfloat16().double() - exact).abs().max() > 1e-3
    grad = torch.randn(9, 17).bfloat16().float()
    logits.backward(grad)
    torch.testing.assert_close(x.grad.double(), grad.double() @ w.detach().double(), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(w.grad.double(), grad.double().t() @ x.detach().double(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("grouped", "local"),
    [
        ("decoder.layers.3.mlp.experts.linear_fc1.weight12", "decoder.layers.3.mlp.experts.local_experts.12.linear_fc1.weight"),
        ("decoder.layers.0.self_attention.linear_qkv.layer_norm_weight", "decoder.layers.0.input_layernorm.weight"),
        ("decoder.layers.0.mlp.linear_fc1.layer_norm_weight", "decoder.layers.0.pre_mlp_layernorm.weight"),
        ("decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.0.mlp.linear_fc1.weight"),
    ],
)
def test_neutral_names_join_the_grounds_and_keep_the_hf_source(grouped, local):
    assert neutral_name(grouped) == local
    assert neutral_name(local) == local
    assert hf_sources(grouped) == hf_sources(local)
