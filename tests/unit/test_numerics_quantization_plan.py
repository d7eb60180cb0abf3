"""One plan for all stages: which modules are FP8, what vLLM is told, which sizes would cut a block."""

import subprocess
import sys

import pytest

from e2e_fp8.config.model import ModelConfig
from e2e_fp8.config.numerics import NumericsConfig
from e2e_fp8.config.root import Config
from e2e_fp8.numerics.quantization_plan import QuantizationPlan, hf_linear_modules

MOE = ModelConfig(num_hidden_layers=2, num_experts=4)
DENSE = ModelConfig(architecture="qwen3", num_hidden_layers=2)


def plan(**numerics) -> QuantizationPlan:
    return QuantizationPlan.from_config(Config(numerics=NumericsConfig(**numerics)))


def test_fields_follow_the_configuration():
    p = plan(scale_format="pow2", backward_format="e4m3", amax_epsilon=1e-10)
    assert (p.training_fp8, p.rollout_fp8, p.power_2_scale) == (True, True, True)
    assert (p.forward_format, p.backward_format, p.amax_epsilon) == ("e4m3", "e4m3", 1e-10)
    p = plan(training_precision="bf16", rollout_precision="fp8")
    assert (p.training_fp8, p.rollout_fp8, p.power_2_scale) == (False, True, False)


@pytest.mark.parametrize(
    ("module", "fp8"),
    [
        ("model.layers.0.mlp.gate", False),
        ("model.layers.0.mlp.gate_proj", True),
        ("model.layers.0.mlp.experts.3.gate_proj", True),
        ("model.layers.11.mlp.gate", False),
        ("model.layers.0.self_attn.q_proj", True),
        ("model.layers.0.self_attn.q_norm", False),
        ("model.layers.0.input_layernorm", False),
        ("model.norm", False),
        ("model.embed_tokens", False),
        ("lm_head", False),
        ("other.lm_head", True),
    ],
)
def test_patterns_match_whole_names(module, fp8):
    """An unanchored ``mlp.gate`` would keep every gate_proj in BF16 on one side only."""
    assert plan().is_fp8(module) is fp8


def test_modules_of_both_families():
    attention = [("q_proj", 256, 256), ("k_proj", 128, 256), ("v_proj", 128, 256), ("o_proj", 256, 256)]
    dense, moe = dict_of(DENSE), dict_of(MOE)
    for name, rows, columns in attention:
        assert dense[f"model.layers.1.self_attn.{name}"] == moe[f"model.layers.1.self_attn.{name}"] == (rows, columns)
    assert dense["model.layers.0.mlp.gate_proj"] == dense["model.layers.0.mlp.up_proj"] == (512, 256)
    assert dense["model.layers.0.mlp.down_proj"] == (256, 512)
    assert moe["model.layers.0.mlp.gate"] == (4, 256)
    assert moe["model.layers.1.mlp.experts.3.down_proj"] == (256, 128)
    assert dense["lm_head"] == moe["lm_head"] == (128, 256)
    assert len(dense) == 2 * 7 + 1
    assert len(moe) == 2 * (4 + 1 + 4 * 3) + 1


def dict_of(model: ModelConfig) -> dict[str, tuple[int, int]]:
    modules = hf_linear_modules(model)
    assert len({name for name, _, _ in modules}) == len(modules)
    return {name: (rows, columns) for name, rows, columns in modules}


@pytest.mark.parametrize("model", [DENSE, MOE], ids=["dense", "moe"])
def test_module_names_are_transformers_own(model):
    """The real model of transformers, built on the meta device, has exactly these linear modules and shapes."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from e2e_fp8.config.hf import to_hf_config

    hf = to_hf_config(model, None)
    config = AutoConfig.for_model(**{k: v for k, v in hf.items() if k != "torch_dtype"})
    with torch.device("meta"):
        real = AutoModelForCausalLM.from_config(config)
    found = {name: tuple(m.weight.shape) for name, m in real.named_modules() if isinstance(m, torch.nn.Linear)}
    ours = dict_of(model)
    experts = {name for name in ours if ".experts." in name or name.endswith("mlp.gate")}
    # transformers 5 holds experts as one stacked parameter and the router as a module of its own.
    assert found == {name: shape for name, shape in ours.items() if name not in experts}
    if model.is_moe:
        parameters = {name: tuple(p.shape) for name, p in real.named_parameters()}
        rows, columns = ours["model.layers.0.mlp.experts.0.gate_proj"]
        assert parameters["model.layers.0.mlp.gate.weight"] == ours["model.layers.0.mlp.gate"]
        assert parameters["model.layers.0.mlp.experts.gate_up_proj"] == (model.num_experts, 2 * rows, columns)


def test_what_vllm_is_told():
    p = plan()
    assert p.ignored_layers(MOE) == ["model.layers.0.mlp.gate", "model.layers.1.mlp.gate", "lm_head"]
    assert p.ignored_layers(DENSE) == ["lm_head"]
    assert p.hf_quantization_config(MOE) == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["model.layers.0.mlp.gate", "model.layers.1.mlp.gate", "lm_head"],
    }


def test_more_high_precision_modules():
    patterns = (*NumericsConfig().high_precision_modules, "model.layers.1.*")
    ignored = plan(high_precision_modules=patterns).ignored_layers(DENSE)
    assert ignored == [name for name, _, _ in hf_linear_modules(DENSE) if name.startswith("model.layers.1.") or name == "lm_head"]


def test_importing_the_plan_needs_no_torch():
    code = "import sys, e2e_fp8.numerics.quantization_plan; assert not {'torch', 'vllm', 'numba'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
