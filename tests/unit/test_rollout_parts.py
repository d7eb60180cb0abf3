"""Parts of the rollout stage that need no engine: layout, seeds, limits, environment, watchdog, CPU arithmetic."""

import itertools
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from e2e_fp8.config.alignment import choices_at
from e2e_fp8.config.load import parse_config
from e2e_fp8.config.root import Config
from e2e_fp8.errors import ConfigError, DataError, EngineError
from e2e_fp8.rollout.engine_args import engine_args
from e2e_fp8.rollout.engine_layout import TensorSlot, engine_layout
from e2e_fp8.rollout.engine_thread import EngineThread
from e2e_fp8.rollout.environment import apply_environment, check_environment, rollout_environment
from e2e_fp8.rollout.sampling import check_prompts, length_at_stop, request_seed
from e2e_fp8.types import Prompt

MOE = {
    "model_type": "qwen3_moe",
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "intermediate_size": 512,
    "moe_intermediate_size": 384,
    "num_experts": 3,
    "vocab_size": 96,
    "quantization_config": {"modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]},
}


def test_layout_covers_every_row_of_every_fused_parameter_once():
    slots = [slot for slot in engine_layout(MOE) if slot.fp8]
    rows: dict[tuple, list[tuple[int, int]]] = {}
    for slot in slots:
        rows.setdefault((slot.parameter, slot.expert), []).append((slot.row, slot.row + slot.shape[0]))
    for spans in rows.values():
        spans.sort()
        assert spans[0][0] == 0
        assert all(end == start for (_, end), (start, _) in itertools.pairwise(spans))
    attention = "model.layers.1.self_attn.qkv_proj.weight"
    experts = "model.layers.1.mlp.experts.routed_experts.w13_weight_scale_inv"
    assert sorted(rows[attention, None]) == [(0, 512), (512, 768), (768, 1024)]
    assert sorted(rows[experts, 2]) == [(0, 3), (3, 6)]
    assert len({slot.name for slot in engine_layout(MOE)}) == len(engine_layout(MOE))


def test_layout_keeps_listed_modules_in_bf16_and_tied_head_out():
    by_name = {slot.name: slot for slot in engine_layout(MOE | {"tie_word_embeddings": True})}
    assert by_name["model.layers.0.mlp.gate.weight"].dtype == torch.bfloat16
    assert "model.layers.0.mlp.gate.weight_scale_inv" not in by_name
    assert by_name["model.layers.0.mlp.experts.1.gate_proj.weight"].dtype == torch.float8_e4m3fn
    assert "lm_head.weight" not in by_name


def test_view_shares_memory_and_refuses_repacked_parameters():
    slot = TensorSlot(name="up", shape=(2, 3), dtype=torch.float32, parameter="w13", expert=1, row=2)
    whole = torch.arange(24.0).view(2, 4, 3)
    view = slot.view({"w13": whole})
    assert torch.equal(view, whole[1, 2:])
    assert view.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    with pytest.raises(EngineError, match="repacked"):
        slot.view({"w13": whole.bfloat16()})
    with pytest.raises(EngineError, match="has no parameter w13"):
        slot.view({})


@given(st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 5000), st.integers(0, 500)), unique=True, min_size=2, max_size=50))
def test_request_seeds_are_distinct_stable_and_fit_a_signed_64_bit_integer(keys):
    seeds = [request_seed(*key) for key in keys]
    assert len(set(seeds)) == len(keys)
    assert seeds == [request_seed(*key) for key in keys]
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_request_seed_is_pinned():
    assert request_seed(1, 2, 3) == 3751671686878481423


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [((), "'bad' has no tokens"), ((1,) * 9, "'bad' has 9 tokens, but at most 8 fit"), ((1, 32), "outside the model's vocabulary of 32")],
)
def test_unusable_prompts_are_named(token_ids, message):
    good = Prompt(uid="good", text="", token_ids=(1,) * 8, answer="")
    check_prompts([good], window=12, max_response_tokens=4, vocab_size=32)
    with pytest.raises(DataError, match=message):
        check_prompts([good, Prompt(uid="bad", text="", token_ids=token_ids, answer="")], window=12, max_response_tokens=4, vocab_size=32)


@settings(max_examples=200)
@given(st.lists(st.sampled_from("abc"), max_size=12), st.lists(st.text("abc", min_size=1, max_size=3), max_size=2))
def test_length_at_stop_is_the_shortest_prefix_with_a_stop_string(tokens, stop):
    ids = [ord(token) for token in tokens]
    found = length_at_stop(ids, stop, lambda part: "".join(map(chr, part)))
    expected = [n for n in range(len(ids) + 1) if any(text in "".join(tokens[:n]) for text in stop)]
    assert found == (expected[0] if expected else None)


def test_shared_operators_on_a_gpu_run_uncompiled_with_graphs_of_decoding(tmp_path):
    levels = ("fast", "aligned", "bitwise")
    configs = [parse_config({"numerics": {"alignment": level}, "rollout": {"enforce_eager": False}}) for level in levels]
    passes = {"pass_config": {"fuse_norm_quant": False, "fuse_act_quant": False}}
    graphs = passes | {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    found = [engine_args(cfg, tmp_path, device="cuda", is_moe=True, fp8=True) for cfg in configs]
    assert [args["compilation_config"] for args in found] == [passes, graphs, graphs]
    assert [args["enforce_eager"] for args in found] == [False] * 3
    assert engine_args(configs[2], tmp_path, device="cpu", is_moe=True, fp8=True)["compilation_config"] == passes


def test_environment_contradictions_are_refused_and_gaps_filled():
    cfg = Config()
    for device in ("cpu", "cuda"):
        environ: dict[str, str] = {"VLLM_NO_USAGE_STATS": "0"}
        apply_environment(cfg, device=device, environ=environ)
        assert environ == rollout_environment(cfg, device=device) | {"VLLM_NO_USAGE_STATS": "0"}
        check_environment(cfg, environ, device=device)
    with pytest.raises(ConfigError, match="VLLM_USE_DEEP_GEMM_E8M0 is '1' but must be '0'"):
        check_environment(cfg, {"VLLM_USE_DEEP_GEMM_E8M0": "1"}, device="cuda")
    with pytest.raises(ConfigError, match=r"rollout\.kv_cache_gib"):
        check_environment(cfg, {"VLLM_CPU_KVCACHE_SPACE": "7"}, device="cpu")


def test_pow2_scales_are_refused_where_vllm_would_requantize():
    cfg = Config.model_validate({"numerics": {"scale_format": "pow2"}})
    check_environment(cfg, {}, device="cpu")
    with pytest.raises(ConfigError, match="scale_format=pow2"):
        check_environment(cfg, {}, device="cuda")


def test_engine_args_follow_the_config(tmp_path):
    cfg = Config.model_validate({"numerics": {"scale_format": "pow2"}, "rollout": {"moe_backend": "triton"}})
    cpu = engine_args(cfg, tmp_path, device="cpu", is_moe=True, fp8=True)
    assert cpu["additional_config"] == {"e2e_fp8": {"power_2_scale": True, "amax_epsilon": 0.0, "alignment": choices_at("fast")}}
    switched = parse_config({"numerics": {"alignment": "bitwise", "alignment_overrides": {"head": "native"}}})
    passed = engine_args(switched, tmp_path, device="cpu", is_moe=True, fp8=True)["additional_config"]["e2e_fp8"]["alignment"]
    assert passed == choices_at("bitwise") | {"head": "native"}
    assert cpu["enable_return_routed_experts"]
    assert "moe_backend" not in cpu
    assert engine_args(cfg, tmp_path, device="cuda", is_moe=True, fp8=True)["moe_backend"] == "triton"
    tokens = {"max_num_batched_tokens": 3000, "max_num_seqs": 2999}
    for changes, expected in (
        ({}, (16384, 2048)),
        (tokens, (3000, 3000)),
        ({"max_num_seqs": 17000}, (17000, 17000)),
        ({"max_model_len": 4096}, (16384, 4096)),
    ):
        stepping = cfg.model_copy(update={"rollout": cfg.rollout.model_copy(update=changes)})
        found = (engine_args(stepping, tmp_path, device=d, is_moe=True, fp8=True)["max_num_batched_tokens"] for d in ("cuda", "cpu"))
        assert tuple(found) == expected
    sized = cfg.model_copy(update={"rollout": cfg.rollout.model_copy(update={"kv_cache_gib": 3})})
    assert engine_args(sized, tmp_path, device="cuda", is_moe=True, fp8=True)["kv_cache_memory_bytes"] == 3 << 30
    assert "kv_cache_memory_bytes" not in engine_args(cfg, tmp_path, device="cuda", is_moe=True, fp8=True)
    assert not engine_args(cfg, tmp_path, device="cpu", is_moe=False, fp8=True)["enable_return_routed_experts"]


def test_wedged_call_is_timed_out_and_names_phase_seconds_and_progress():
    thread, release = EngineThread(), threading.Event()

    def stuck() -> None:
        thread.progress = "3 of 8 done"
        release.wait(30)

    start = time.monotonic()
    with pytest.raises(EngineError, match=r"wedged: weight update did not finish within 0\.2 s \(3 of 8 done\)"):
        thread.run("weight update", 0.2, stuck)
    assert time.monotonic() - start < 5
    with pytest.raises(EngineError, match=r"dead \(weight update did not finish"):
        thread.run("generation", 1, lambda: 1)
    release.set()


def test_failing_call_kills_the_engine_but_a_user_error_does_not():
    thread = EngineThread()
    with pytest.raises(DataError, match="bad prompt"):
        thread.run("generation", 5, lambda: (_ for _ in ()).throw(DataError("bad prompt")))
    assert thread.run("generation", 5, lambda: 7) == 7
    with pytest.raises(EngineError, match="died: generation failed with TimeoutError: inner"):
        thread.run("generation", 5, lambda: (_ for _ in ()).throw(TimeoutError("inner")))
    with pytest.raises(EngineError, match="is dead"):
        thread.run("generation", 5, lambda: 7)
