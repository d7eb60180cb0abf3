"""Parsing, overrides, cross-field rules: each wrong input gives one sentence that names the field and the way out."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from e2e_fp8.config.load import config_fields, dump_config, load_config, parse_config
from e2e_fp8.config.root import Config
from e2e_fp8.config.validation import linear_modules
from e2e_fp8.errors import ConfigError

REPO = Path(__file__).resolve().parents[2]


def refusal(values: dict) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(values)
    return str(caught.value)


def test_config_imports_no_torch():
    code = (
        "import sys, e2e_fp8.config.load, e2e_fp8.config.hf, e2e_fp8.cli.main, e2e_fp8.doctor\n"
        "heavy = {'torch', 'numpy', 'transformers', 'vllm', 'megatron'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("path", sorted((REPO / "configs").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_shipped_config_parses_and_dumps_back(path, tmp_path):
    cfg = load_config(path)
    assert cfg.run.name == path.stem, "a run folder is named after its file"
    copy = tmp_path / "copy.yaml"
    copy.write_text(dump_config(cfg))
    assert load_config(copy) == cfg


def test_large_config_has_half_a_billion_weights():
    assert load_config(REPO / "configs" / "moe_0p5b_h200.yaml").model.num_parameters >= 500_000_000


def test_bf16_and_quickstart_differ_in_precision_alone():
    fp8, bf16 = (load_config(REPO / "configs" / f"{name}.yaml") for name in ("quickstart", "bf16"))
    assert bf16.numerics.training_precision == bf16.numerics.rollout_precision == "bf16"
    assert bf16.model_copy(update={"numerics": fp8.numerics, "run": fp8.run}) == fp8


def test_overrides_apply_in_order_and_parse_as_yaml(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("run: {steps: 3}\n")
    overrides = [
        "run.steps=4",
        "run.steps=5",
        "training.learning_rate=1e-5",
        "training.warm_start.steps=7",
        "rollout.stop=['a', 'b']",
        "task.params={max_terms: 3}",
        "run.wandb_project=null",
        "correction.rollout_is=null",
    ]
    cfg = load_config(path, overrides)
    assert (cfg.run.steps, cfg.training.learning_rate, cfg.training.warm_start.steps) == (5, 1e-5, 7)
    assert (cfg.rollout.stop, cfg.task.params, cfg.correction.rollout_is) == (("a", "b"), {"max_terms": 3}, None)


@settings(max_examples=60, deadline=None)
@given(field=st.sampled_from(config_fields()), letter=st.sampled_from("abcxyz_"))
def test_a_misspelt_field_is_named_with_the_right_one(field, letter):
    section, _, leaf = field.rpartition(".")
    wrong = f"{leaf}{letter}"
    if f"{section}.{wrong}" in config_fields():
        return
    values: dict = {wrong: 1}
    for part in reversed(section.split(".")):
        values = {part: values}
    message = refusal(values)
    assert f"unknown field {section}.{wrong}" in message
    assert field in message


def test_a_field_in_the_wrong_section_is_pointed_to_its_own():
    assert "training.learning_rate" in refusal({"run": {"learning_rate": 1e-4}})


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"training": {"learning_rate": -1}}, ("training.learning_rate is -1", "greater than 0")),
        ({"training": {"learning_rate": float("nan")}}, ("training.learning_rate is nan", "finite")),
        ({"training": {"clip_grad": float("inf")}}, ("training.clip_grad is inf", "finite")),
        ({"run": {"steps": "many"}}, ("run.steps is 'many'", "whole number")),
        ({"run": {"steps": 1.5}}, ("run.steps is 1.5", "whole number")),
        ({"run": {"steps": True}}, ("run.steps is True", "whole number")),
        ({"training": {"learning_rate": True}}, ("training.learning_rate is True", "number")),
        ({"run": {"name": "a/b"}}, ("run.name is 'a/b'", "must match")),
        ({"run": {"name": ".."}}, ("run.name is '..'", "must match")),
        ({"run": {"name": 3}}, ("run.name is 3", "quote it")),
        ({"run": {"resume": "maybe"}}, ("run.resume is 'maybe'", "true or false")),
        ({"run": 3}, ("run is 3", "section of fields")),
        ({"rollout": {"group_size": 0}}, ("rollout.group_size is 0", "at least 1")),
        ({"rollout": {"moe_backend": "cutlass"}}, ("rollout.moe_backend is 'cutlass'", "'deep_gemm' or 'triton'")),
        ({"numerics": {"scale_format": "fp16"}}, ("numerics.scale_format is 'fp16'", "'fp32' or 'pow2'")),
        ({"objective": {"clip_low": 1.5}}, ("objective.clip_low is 1.5", "at most 1")),
    ],
)
def test_single_field_mistakes_are_one_sentence(values, parts):
    message = refusal(values)
    assert "\n" not in message
    assert "pydantic" not in message
    for part in parts:
        assert part in message


def test_every_wrong_field_gets_its_own_line():
    assert len(refusal({"run": {"steps": -1, "seed": -1}, "training": {"adam_beta1": 1.0}}).splitlines()) == 3


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"model": {"num_attention_heads": 3, "num_key_value_heads": 2}}, ("num_attention_heads is 3", "multiple")),
        ({"model": {"head_dim": 3}, "numerics": {"training_precision": "bf16", "rollout_precision": "bf16"}}, ("head_dim is 3", "even")),
        ({"model": {"num_experts_per_tok": 9}}, ("num_experts_per_tok is 9", "8 experts")),
        ({"numerics": {"rollout_precision": "bf16"}}, ("training_precision is fp8", "rollout_precision to fp8")),
        ({"rollout": {"max_response_tokens": 256}}, ("max_response_tokens is 256", "max_model_len is 256")),
        ({"rollout": {"max_model_len": 513}}, ("max_model_len is 513", "max_position_embeddings is 512")),
        ({"training": {"max_tokens_per_microbatch": 255}}, ("max_tokens_per_microbatch is 255", "raise the second")),
        ({"rollout": {"max_num_batched_tokens": 255}}, ("max_num_batched_tokens is 255", "max_model_len is 256")),
        ({"rollout": {"max_num_batched_tokens": 300, "max_num_seqs": 301}}, ("max_num_batched_tokens is 300", "max_num_seqs is 301")),
        ({"training": {"minibatches_per_step": 17}}, ("minibatches_per_step is 17", "16 prompts")),
        ({"rollout": {"tensor_parallel": 2}}, ("rollout.tensor_parallel is 2", "set rollout.placement to server")),
        ({"sync": {"transport": "nccl"}}, ("sync.transport is nccl", "rollout.placement is in_process")),
        ({"rollout": {"placement": "server"}}, ("sync.transport is local", "set sync.transport to ipc, nccl, ranks or disk")),
        ({"rollout": {"server_url": "http://127.0.0.1:1"}}, ("rollout.server_url is set", "set placement to server")),
        ({"rollout": {"server_devices": "1"}}, ("rollout.server_devices is set", "set placement to server")),
        ({"training": {"parallel": {"tensor": 2}}}, ("model.num_key_value_heads is 1", "training.parallel.tensor = 2", "equal share")),
        ({"training": {"parallel": {"expert": 3}}}, ("model.num_experts is 8", "training.parallel.expert = 3")),
        ({"training": {"parallel": {"pipeline": 4}}}, ("model.num_hidden_layers is 2", "training.parallel.pipeline x")),
        ({"training": {"parallel": {"virtual_pipeline": 2}}}, ("virtual_pipeline is 2", "training.parallel.pipeline is 1")),
        (
            {"model": {"architecture": "qwen3"}, "training": {"parallel": {"expert": 2}}},
            ("training.parallel.expert is 2", "qwen3 has no experts"),
        ),
        ({"task": {"kind": "file"}}, ("task.path is not set", "JSONL or parquet")),
        ({"task": {"path": "x.jsonl"}}, ("task.path is 'x.jsonl'", "task.kind to file")),
        ({"task": {"reward": "maths"}}, ("task.reward is 'maths'", "package.module:function")),
        ({"numerics": {"high_precision_modules": ["lm_head"]}}, ("model.layers.0.mlp.gate", "add '*.mlp.gate'")),
        ({"numerics": {"high_precision_modules": ["*.mlp.gate"]}}, ("leaves lm_head", "add 'lm_head'")),
        ({"numerics": {"high_precision_modules": ["lm_head", "*.mlp.gate", "*.q_proj"]}}, ("one fused layer", "k_proj")),
        ({"numerics": {"high_precision_modules": ["lm_head", "*.mlp.gate", "*.experts.3.*"]}}, ("one fused layer", "experts.3")),
        (
            {"numerics": {"high_precision_modules": ["lm_head", "*.mlp.gate", "self_attn.o_proj"]}},
            ("'self_attn.o_proj' matches no module", "close"),
        ),
        ({"model": {"hidden_size": 200}}, ("model.hidden_size is 200", "q_proj", "use 128 or 256", "training_precision")),
        ({"model": {"moe_intermediate_size": 100}}, ("model.moe_intermediate_size is 100", "experts.0.gate_proj", "use 128")),
        ({"model": {"architecture": "qwen3", "intermediate_size": 300}}, ("model.intermediate_size is 300", "mlp.down_proj", "256 or 384")),
        ({"model": {"head_dim": 64, "num_attention_heads": 4}}, ("model.num_key_value_heads x model.head_dim is 64", "k_proj")),
        (
            {"sync": {"transport": "shared"}, "numerics": {"training_precision": "bf16"}},
            ("sync.transport is shared", "training_precision is bf16", "sync.transport=local"),
        ),
        (
            {"rollout": {"placement": "server"}, "sync": {"transport": "ranks"}, "numerics": {"training_precision": "bf16"}},
            ("sync.transport is ranks", "training_precision is bf16", "sync.transport=nccl"),
        ),
        ({"sync": {"transport": "ranks"}}, ("sync.transport is ranks", "in_process", "rollout.placement to server")),
        (
            {"rollout": {"placement": "server", "expert_parallel": True}, "sync": {"transport": "ipc"}},
            ("rollout.expert_parallel is true", "rollout.tensor_parallel is 1", "at least one to each"),
        ),
    ],
)
def test_cross_field_mistakes_name_the_rule_and_the_remedy(values, parts):
    message = refusal(values)
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_precision_ways_out_work():
    ragged = {"hidden_size": 200, "moe_intermediate_size": 100}
    both_bf16 = {"training_precision": "bf16", "rollout_precision": "bf16"}
    assert parse_config({"model": ragged, "numerics": both_bf16}).model.hidden_size == 200
    keep = ["lm_head", "*.mlp.gate", "*_proj"]
    assert parse_config({"model": ragged, "numerics": {"high_precision_modules": keep}}).model.hidden_size == 200
    # Both sides stack q, k and v by rows only, so half-tile heads are fine when each of the three is whole.
    heads = {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    assert parse_config({"model": heads}).model.head_dim == 64


@settings(max_examples=60, deadline=None)
@given(
    architecture=st.sampled_from(["qwen3", "qwen3_moe"]),
    hidden=st.integers(1, 6).map(lambda n: 64 * n),
    width=st.integers(1, 6).map(lambda n: 64 * n),
    head_dim=st.sampled_from([64, 128]),
    kv=st.integers(1, 2),
    groups=st.integers(1, 2),
)
def test_tile_rule_agrees_with_module_shapes(architecture, hidden, width, head_dim, kv, groups):
    """The rule speaks of config fields; the truth is the shape of each linear module."""
    model = {
        "architecture": architecture,
        "hidden_size": hidden,
        "intermediate_size": width,
        "moe_intermediate_size": width,
        "head_dim": head_dim,
        "num_key_value_heads": kv,
        "num_attention_heads": kv * groups,
    }
    plain = parse_config({"model": model, "numerics": {"training_precision": "bf16", "rollout_precision": "bf16"}})
    shapes = [(n, k) for name, n, k in linear_modules(plain.model) if not name.endswith((".gate", "lm_head"))]
    whole = all(size % 128 == 0 for size in itertools.chain.from_iterable(shapes))
    values = {"model": model, "numerics": {"training_precision": "fp8", "rollout_precision": "fp8"}}
    if whole:
        parse_config(values)
    else:
        assert "not a multiple of 128" in refusal(values)


TP2_MODEL = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128, "moe_intermediate_size": 256}
SERVED = {"rollout": {"placement": "server", "tensor_parallel": 2}, "sync": {"transport": "ipc"}}
BF16_TRAINING = {"numerics": {"training_precision": "bf16"}}


def test_tiles_that_a_checkpoint_cannot_hold_pass_from_rank_to_rank_alone():
    """K and V of one 64-wide head share a tile at each rank of both sides."""
    shared = {"model": TP2_MODEL | {"head_dim": 64}, "training": {"parallel": {"tensor": 2}}}
    assert "self_attn.qkv_proj.weight: tiles of" in refusal(SERVED | shared)
    assert parse_config(SERVED | shared | {"sync": {"transport": "ranks"}}).model.head_dim == 64
    alone = shared | {"training": {"parallel": {"tensor": 1}}}
    assert "v_proj.weight at rows 0, 64" in refusal(SERVED | alone | {"sync": {"transport": "ranks"}})


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        (
            {"training": {"parallel": {"tensor": 2, "expert_tensor": 2}}, "model": {"moe_intermediate_size": 128}},
            (
                "layers.{0-1}.mlp.experts.routed_experts.w13_weight: mlp.experts.0.gate_proj.weight at rows 64",
                "training.parallel.tensor=2 training.parallel.expert_tensor=1 rollout.tensor_parallel=1",
            ),
        ),
        (
            SERVED | {"model": {"moe_intermediate_size": 128}},
            ("vLLM refuses experts of 64 rows a rank (not a multiple of 128)", "expert_tensor=1 rollout.tensor_parallel=1"),
        ),
        (
            SERVED | BF16_TRAINING | {"model": {"moe_intermediate_size": 128}, "training": {"parallel": {"tensor": 2}}},
            ("vLLM refuses experts of 64 rows a rank (not a multiple of 128)", "These would work: rollout.tensor_parallel=1."),
        ),
        (
            {"model": {"architecture": "qwen3", "intermediate_size": 384}, "training": {"parallel": {"tensor": 2}}},
            ("mlp.down_proj.weight: mlp.down_proj.weight at columns 192", "training.parallel.tensor=1 rollout.tensor_parallel=1"),
        ),
        (SERVED | {"model": {"num_attention_heads": 3, "num_key_value_heads": 1}}, ("The heads of q_proj: 3 does not divide by 2",)),
    ],
    ids=["experts", "engine", "rollout_only", "dense", "heads"],
)
def test_parallel_sizes_that_cut_tiles_are_refused_with_what_would_work(values, parts):
    message = refusal(values | {"model": TP2_MODEL | values["model"]})
    for part in parts:
        assert part in message, message


def test_each_size_that_a_refusal_names_is_accepted():
    model = TP2_MODEL | {"architecture": "qwen3", "intermediate_size": 384}
    refused = {"model": model, "training": {"parallel": {"tensor": 2}}}
    settings_ = refusal(refused).splitlines()[-1].removeprefix("These would work: ").removesuffix(".").split("; ")
    for setting in settings_:
        tensor, rollout = (word.partition("=")[2] for word in setting.split())
        for size in rollout.split("|"):
            values = {"model": model, "training": {"parallel": {"tensor": int(tensor)}}} | SERVED
            values["rollout"] = {"placement": "server", "tensor_parallel": int(size)}
            assert parse_config(values).training.parallel.tensor == int(tensor)


def test_one_tile_of_two_heads_passes_no_checkpoint_and_is_refused():
    """Keys and values of half a tile each: trainer and engine stack them alike, but no Hugging Face tensor holds the shared tile."""
    model = {"architecture": "qwen3", "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 512}
    message = refusal(SERVED | {"model": model, "training": {"parallel": {"tensor": 2}}})
    assert "qkv_proj.weight: tiles of self_attn.k_proj.weight, self_attn.v_proj.weight are cut" in message


def test_bf16_on_both_sides_has_no_tiles():
    values = {"model": TP2_MODEL | {"moe_intermediate_size": 128}, "numerics": {"training_precision": "bf16", "rollout_precision": "bf16"}}
    assert parse_config(SERVED | values).rollout.tensor_parallel == 2


def test_router_pattern_does_not_keep_gate_proj():
    names = [name for name, _, _ in linear_modules(Config().model)]
    assert "model.layers.0.mlp.gate" in names
    assert "model.layers.0.mlp.experts.0.gate_proj" in names
    message = refusal({"model": {"moe_intermediate_size": 100}})
    assert "gate_proj" in message, "'*.mlp.gate' must not match an expert's gate_proj"


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("run: {steps: 1, steps: 2}\n", "given twice"),
        ("run:\n  steps: [1\n", "not valid YAML"),
        ("- 1\n- 2\n", "holds a list"),
        ("run: {steps: !!python/object/apply:os.getcwd []}\n", "not valid YAML"),
    ],
)
def test_broken_yaml_is_refused_with_its_place(tmp_path, text, part):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"run\.yaml") as caught:
        load_config(path)
    assert part in str(caught.value)


@pytest.mark.parametrize(
    ("override", "part"),
    [("steps", "section.field=value"), ("run.steps.x=1", "not a section"), ("run.stepz=1", "run.steps"), ("run.name=[", "not valid YAML")],
)
def test_broken_overrides_are_refused(tmp_path, override, part):
    path = tmp_path / "run.yaml"
    path.write_text("run: {steps: 1}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path, [override])
    assert part in str(caught.value)


def test_missing_file_and_binary_file(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        load_config(tmp_path / "none.yaml")
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(bytes(range(128, 256)))
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(binary)


def test_empty_file_means_defaults(tmp_path):
    path = tmp_path / "empty.yaml"
    path.write_text("")
    assert load_config(path) == Config()
    assert yaml.safe_load(dump_config(Config()))["run"]["steps"] == Config().run.steps


def test_config_reference_is_current_and_complete():
    tool = [sys.executable, str(REPO / "tools" / "check_config_docs.py")]
    result = subprocess.run(tool, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    text = (REPO / "docs" / "config.md").read_text()
    assert all(f"`{field.rpartition('.')[2]}`" in text for field in config_fields())
