"""``config.json`` both ways, checked with the readers that count: transformers and vLLM."""

import json
import random

import pytest

from e2e_fp8.config.hf import to_hf_config
from e2e_fp8.config.load import parse_config
from e2e_fp8.config.model import ModelConfig
from e2e_fp8.errors import ConfigError

QUANTIZATION = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head"],
}


def random_model(architecture: str, seed: int) -> ModelConfig:
    rng = random.Random(seed)
    heads = rng.choice([2, 4])
    return ModelConfig(
        architecture=architecture,
        vocab_size=rng.randint(16, 300),
        hidden_size=128 * rng.randint(1, 4),
        num_hidden_layers=rng.randint(1, 4),
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=128,
        intermediate_size=128 * rng.randint(1, 4),
        moe_intermediate_size=128 * rng.randint(1, 4),
        num_experts=rng.randint(4, 9),
        num_experts_per_tok=rng.randint(1, 4),
        norm_topk_prob=rng.random() < 0.5,
        rope_theta=float(rng.randint(1000, 100_000)),
        rms_norm_eps=rng.choice([1e-5, 1e-6]),
        max_position_embeddings=rng.randint(256, 1000),
        tie_word_embeddings=rng.random() < 0.5,
        initializer_range=rng.choice([0.01, 0.02]),
    )


def write(folder, hf: dict) -> str:
    (folder / "config.json").write_text(json.dumps(hf))
    return str(folder)


def same_model(read: ModelConfig, written: ModelConfig) -> None:
    skip = {"hf_path"} if written.is_moe else {"hf_path", "moe_intermediate_size", "num_experts", "num_experts_per_tok", "norm_topk_prob"}
    assert read.model_dump(exclude=skip) == written.model_dump(exclude=skip)


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("seed", range(3))
def test_fields_survive_the_file(tmp_path, architecture, seed):
    model = random_model(architecture, seed)
    same_model(ModelConfig(hf_path=write(tmp_path, to_hf_config(model, QUANTIZATION))), model)


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_transformers_reads_and_writes_the_same_model(tmp_path, architecture):
    import torch
    import transformers

    model = random_model(architecture, 7)
    folder = write(tmp_path, to_hf_config(model, None, eos_token_id=3, bos_token_id=1))
    hf = transformers.AutoConfig.from_pretrained(folder)
    assert (hf.rope_parameters["rope_theta"], hf.dtype, hf.eos_token_id, hf.bos_token_id) == (model.rope_theta, torch.bfloat16, 3, 1)
    with torch.device("meta"):
        network = transformers.AutoModelForCausalLM.from_config(hf)
    assert type(network).__name__ == hf.architectures[0]
    assert sum(p.numel() for p in network.parameters()) == model.num_parameters
    hf.save_pretrained(folder)
    same_model(ModelConfig(hf_path=folder), model)


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_vllm_reads_the_same_model(tmp_path, architecture):
    from vllm.transformers_utils import config

    model = random_model(architecture, 8)
    hf = config.get_config(write(tmp_path, to_hf_config(model, QUANTIZATION, eos_token_id=3)), trust_remote_code=False)
    assert hf.rope_parameters == {"rope_type": "default", "rope_theta": model.rope_theta}
    assert (hf.head_dim, hf.tie_word_embeddings, hf.quantization_config["weight_block_size"]) == (
        128,
        model.tie_word_embeddings,
        [128, 128],
    )
    if model.is_moe:
        assert (hf.num_experts, hf.decoder_sparse_step, hf.mlp_only_layers) == (model.num_experts, 1, [])


def test_older_files_with_plain_rope_theta(tmp_path):
    model = random_model("qwen3_moe", 9)
    hf = to_hf_config(model, None)
    del hf["rope_parameters"]
    same_model(ModelConfig(hf_path=write(tmp_path, hf)), model)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"model_type": "llama"}, "model_type is 'llama'"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"layer_types": ["sliding_attention"]}, "sliding-window"),
        ({"attention_bias": True}, "attention_bias is true"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}}, "rope scaling 'yarn'"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope scaling 'linear'"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step 2"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers [0]"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"hidden_size": None}, "model.hidden_size is None"),
    ],
)
def test_what_is_not_implemented_is_refused(tmp_path, change, part):
    hf = to_hf_config(ModelConfig(), None) | change
    with pytest.raises(ConfigError) as caught:
        parse_config({"model": {"hf_path": write(tmp_path, hf)}})
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_key_or_file_or_bad_json_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        ModelConfig(hf_path=str(tmp_path))
    hf = to_hf_config(ModelConfig(), None)
    del hf["num_hidden_layers"]
    with pytest.raises(ConfigError, match="num_hidden_layers is missing"):
        ModelConfig(hf_path=write(tmp_path, hf))
    (tmp_path / "config.json").write_text('{"model_type": ')
    with pytest.raises(ConfigError, match=r"not valid JSON \(line 1"):
        ModelConfig(hf_path=str(tmp_path))


def test_fields_beside_hf_path_must_agree(tmp_path):
    folder = write(tmp_path, to_hf_config(ModelConfig(), None))
    assert parse_config({"model": {"hf_path": folder, "hidden_size": 256}}).model.hidden_size == 256
    with pytest.raises(ConfigError, match="hidden_size is 384 here and 256 there"):
        parse_config({"model": {"hf_path": folder, "hidden_size": 384}})
