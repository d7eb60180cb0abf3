"""Known straddles of public models: which tile is cut, who refuses, what would work."""

import json
from pathlib import Path

import pytest

from e2e_fp8.errors import LayoutError
from e2e_fp8.layout import EngineParallel, MegatronParallel, engine_shards, hf_tensors, ignored_prefixes, megatron_shards
from e2e_fp8.layout.plan import Plan
from e2e_fp8.layout.straddles import check, verdicts
from e2e_fp8.layout.tiles import te_scale_shape

CONFIGS = Path(__file__).parents[1] / "data" / "hf_configs"


def config_of(model: str) -> dict:
    return json.loads((CONFIGS / f"{model}.json").read_text())


def plan_of(model: str, train_tp: int, rollout_tp: int, order: str = "megatron", *, etp: int | None = None, ep: bool = False) -> Plan:
    train = MegatronParallel(tensor=train_tp, expert_tensor=etp)
    return Plan.from_config(config_of(model), train, EngineParallel(tensor=rollout_tp, expert=ep), qkv_order=order)


def by_parameter(plan: Plan) -> dict:
    """Parameter -> verdict of the last kind of layer."""
    return {one.parameter.removesuffix(".weight"): one for one in verdicts(plan)}


def refused(plan: Plan) -> dict:
    return {name: one for name, one in by_parameter(plan).items() if one.verdict == "refuse"}


def test_qwen2p5_0p5b_query_group_of_576_rows_cuts_tiles_in_megatrons_order_only():
    found = refused(plan_of("Qwen2.5-0.5B", 1, 1, "megatron"))
    assert set(found) == {"self_attn.qkv_proj"}
    # group 0 is 7 query heads of 64 rows, k, v: the trainer's tile 3 holds query head 6 and key head 0, and group 1 starts at 4.5
    assert found["self_attn.qkv_proj"].cuts == (
        "self_attn.q_proj.weight at rows 448",
        "self_attn.k_proj.weight at rows 64",
        "self_attn.v_proj.weight at rows 64",
    )
    assert {one.verdict for one in verdicts(plan_of("Qwen2.5-0.5B", 1, 1, "engine"))} == {"pass"}


def test_qwen2p5_0p5b_ffn_4864_at_tp4_is_9p5_tiles():
    config = config_of("Qwen2.5-0.5B") | {"num_attention_heads": 8, "num_key_value_heads": 4}
    # with the public 14 heads, four ranks are impossible from the start
    with pytest.raises(LayoutError, match=r"14 does not divide by 4"):
        verdicts(plan_of("Qwen2.5-0.5B", 1, 4))
    found = refused(Plan.from_config(config, MegatronParallel(tensor=4), EngineParallel(tensor=4), qkv_order="engine"))
    assert found["mlp.down_proj"].refusals == ("vLLM refuses 1216 input columns a rank (not a multiple of 128)",)
    # gate and up of a rank are 1216 rows each: trainer and engine stack them alike, so that matrix alone would pass
    assert "mlp.gate_up_proj" not in found


def test_llama3p2_1b_key_and_value_of_a_group_share_one_tile():
    found = refused(plan_of("Llama-3.2-1B", 1, 1, "megatron"))
    assert set(found) == {"self_attn.qkv_proj"}
    assert found["self_attn.qkv_proj"].cuts[0] == "self_attn.k_proj.weight at rows 64, 192, 320, 448"
    assert {one.verdict for one in verdicts(plan_of("Llama-3.2-1B", 1, 1, "engine"))} == {"pass"}
    # one group a rank: both sides stack q, k, v alike and share the tile of k and v; a checkpoint cannot hold it
    for order in ("megatron", "engine"):
        found = by_parameter(plan_of("Llama-3.2-1B", 8, 8, order))
        assert found["self_attn.qkv_proj"].verdict == "native"
        assert found["self_attn.qkv_proj"].checkpoint_cuts == tuple(f"self_attn.{part}_proj.weight" for part in "kv")
        assert {one.verdict for name, one in found.items() if name != "self_attn.qkv_proj"} == {"pass"}


def test_qwen2p5_7b_ffn_18944_at_tp8_is_18p5_tiles():
    config = config_of("Qwen2.5-7B") | {"num_attention_heads": 32}
    with pytest.raises(LayoutError, match=r"28 does not divide by 8"):
        verdicts(plan_of("Qwen2.5-7B", 1, 8))
    found = refused(Plan.from_config(config, MegatronParallel(tensor=1), EngineParallel(tensor=8)))
    assert found["mlp.down_proj"].refusals == ("vLLM refuses 2368 input columns a rank (not a multiple of 128)",)
    # rank 1 starts at row 2368, half a tile of the trainer's, so every tile of it meets two
    assert found["mlp.gate_up_proj"].cuts[1].startswith("mlp.gate_proj.weight at rows 2432, 2560, 2688")
    assert {one.verdict for one in verdicts(plan_of("Qwen2.5-7B", 4, 4))} == {"pass"}


def test_qwen3_0p6b_ffn_3072_at_tp16_is_192_rows():
    found = refused(plan_of("Qwen3-0.6B", 16, 16))
    assert set(found) == {"mlp.down_proj"}
    assert found["mlp.down_proj"].refusals == ("vLLM refuses 192 input columns a rank (not a multiple of 128)",)
    assert by_parameter(plan_of("Qwen3-0.6B", 16, 16))["mlp.gate_up_proj"].verdict == "native"


@pytest.mark.parametrize(("model", "ranks"), [("Qwen3-30B-A3B", 4), ("Qwen3-235B-A22B", 8)])
def test_experts_of_192_rows_a_rank_are_refused_and_whole_experts_pass(model, ranks):
    found = refused(plan_of(model, 1, ranks, etp=1))
    assert {"mlp.experts.routed_experts.w13_weight", "mlp.experts.routed_experts.w2_weight"} == set(found)
    for one in found.values():
        assert one.refusals == ("vLLM refuses experts of 192 rows a rank (not a multiple of 128)",)
        assert one.cuts
    for whole in (plan_of(model, 1, ranks // 2, etp=1), plan_of(model, ranks, ranks, etp=1, ep=True)):
        assert {one.verdict for one in verdicts(whole)} == {"pass"}


def test_experts_split_over_training_ranks_are_cut_for_a_whole_engine():
    found = refused(plan_of("Qwen3-30B-A3B", 4, 1, etp=4))
    assert found["mlp.experts.routed_experts.w2_weight"].refusals == ()
    assert found["mlp.experts.routed_experts.w2_weight"].cuts == ("mlp.experts.0.down_proj.weight at columns 192, 320, 576, 704",)


def test_deepseek_v3_ffn_18432_at_tp32_is_4p5_tiles():
    found = refused(plan_of("DeepSeek-V3", 8, 32, etp=1, ep=True))
    assert found["mlp.down_proj"].refusals == ("vLLM refuses 576 input columns a rank (not a multiple of 128)",)
    assert {one.verdict for one in verdicts(plan_of("DeepSeek-V3", 8, 16, etp=1, ep=True))} == {"pass"}
    # 576 rows of kv_a are 4.5 tiles as well, but last in a matrix that is never split
    assert by_parameter(plan_of("DeepSeek-V3", 8, 8, etp=1, ep=True))["self_attn.fused_qkv_a_proj"].verdict == "pass"


@pytest.mark.parametrize(
    ("model", "sizes", "etp", "ep"),
    [
        ("Qwen3-8B", (1, 2, 4, 8), None, False),
        ("Llama-3.1-8B", (1, 2, 4, 8, 16), None, False),
        ("Qwen3-30B-A3B", (1, 2), None, False),
        ("Qwen3-30B-A3B", (4, 8), 1, True),
    ],
)
def test_clean_models_pass_between_all_sizes(model, sizes, etp, ep):
    for train_tp in sizes:
        for rollout_tp in sizes:
            assert {one.verdict for one in verdicts(plan_of(model, train_tp, rollout_tp, etp=etp, ep=ep))} == {"pass"}


def test_a_refusal_lists_tensors_rows_and_sizes_that_work():
    with pytest.raises(LayoutError) as caught:
        check(plan_of("Qwen3-30B-A3B", 4, 4))
    text = str(caught.value)
    assert "model.layers.{0-47}.mlp.experts.routed_experts.w2_weight: vLLM refuses experts of 192 rows a rank" in text
    assert "--train-tp 4 --train-etp 1 --qkv-order megatron --rollout-tp 1|2" in text
    assert "--train-tp 4 --train-etp 1 --qkv-order megatron --rollout-ep --rollout-tp 4" in text


def test_every_suggestion_of_a_refusal_works():
    config = config_of("Llama-3.2-1B")
    with pytest.raises(LayoutError) as caught:
        check(Plan.from_config(config, MegatronParallel(), EngineParallel(tensor=2)))
    lines = str(caught.value).splitlines()[-1].removeprefix("These would work: ").removesuffix(".").split("; ")
    assert lines
    for line in lines:
        words = line.split()
        options = dict(zip(words[::2], words[1::2], strict=True))
        for size in options["--rollout-tp"].split("|"):
            train, rollout = MegatronParallel(tensor=int(options["--train-tp"])), EngineParallel(tensor=int(size))
            assert check(Plan.from_config(config, train, rollout, qkv_order=options["--qkv-order"]))


def test_transformer_engine_pads_six_columns_of_scales_to_eight():
    assert te_scale_shape(2048, 768) == (16, 8)
    down = next(p for p in megatron_shards(config_of("Qwen3-30B-A3B"), MegatronParallel(), 0) if p.name.endswith("linear_fc2.weight0"))
    assert (down.shape, down.scale_shape, down.te_scale_shape) == ((2048, 768), (16, 6), (16, 8))


def test_engine_order_above_the_key_value_heads_is_refused():
    with pytest.raises(LayoutError, match="above the 4 key-value heads"):
        megatron_shards(config_of("Qwen3-30B-A3B"), MegatronParallel(tensor=8, expert_tensor=1), 0, qkv_order="engine")


def test_fused_modules_of_mixed_precision_are_refused():
    with pytest.raises(LayoutError, match="only one is FP8"):
        engine_shards(config_of("Qwen3-8B"), EngineParallel(), 0, fp8=lambda module: not module.endswith("layers.3.self_attn.k_proj"))


def test_modules_kept_in_bf16_make_layers_of_another_kind():
    config = config_of("Qwen3-8B")
    first = [f"model.layers.0.self_attn.{part}_proj" for part in "qkvo"]
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": first}
    precision = {tensor.name: tensor.fp8 for tensor in hf_tensors(config)}
    assert not any(precision[f"{name}.weight"] for name in first)
    assert precision["model.layers.1.self_attn.q_proj.weight"]
    assert precision["model.layers.0.mlp.up_proj.weight"]
    found = verdicts(Plan.from_config(config, MegatronParallel(), EngineParallel()))
    assert [one.layers for one in found if one.parameter == "self_attn.qkv_proj.weight"] == [tuple(range(1, 36))]


def test_number_of_weights_of_public_models():
    """Against the counts that the model cards give."""
    for model, billions in {
        "Qwen3-0.6B": 0.596,
        "Qwen3-8B": 8.19,
        "Qwen3-30B-A3B": 30.5,
        "Qwen3-235B-A22B": 235.1,
        "Llama-3.1-8B": 8.03,
    }.items():
        assert count(model) == pytest.approx(billions, rel=2e-3), model
    for model, billions in {"Qwen2.5-0.5B": 0.494, "Qwen2.5-7B": 7.62, "Llama-3.2-1B": 1.236, "DeepSeek-V3": 671.0}.items():
        assert count(model) == pytest.approx(billions, rel=2e-3), model


def count(model: str) -> float:
    total = 0
    for tensor in hf_tensors(config_of(model)):
        rows, columns = (*tensor.shape, 1)[:2]
        total += rows * columns
    return total / 1e9


def test_multi_token_prediction_layers_are_named_as_ignored():
    assert ignored_prefixes(config_of("DeepSeek-V3")) == ["model.layers.61."]
    assert not any(tensor.name.startswith("model.layers.61.") for tensor in hf_tensors(config_of("DeepSeek-V3")))


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"model_type": "gpt2"}, "'gpt2' has no layout"),
        ({"hidden_size": None}, "hidden_size is None"),
        ({"attention_bias": True}, "attention_bias"),
        ({"num_key_value_heads": 5}, "not a multiple"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [1, 128]}}, "weight_block_size"),
    ],
)
def test_unusable_configurations_are_refused_in_a_sentence(change, part):
    with pytest.raises(LayoutError, match=part):
        list(hf_tensors(config_of("Qwen3-8B") | change))
