"""The trainer on a Hopper GPU, in a fresh process because Transformer Engine reads the scale kind when it is imported."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
from fresh_process import run_fresh

SCRIPT = """
import sys
import torch
from e2e_fp8.config.root import Config
from e2e_fp8.numerics.blockwise import quantize_blockwise
from e2e_fp8.training.engine import MegatronEngine
from training_cases import fresh_generator, nll, random_batch, trained_tokens

architecture, scale_format, weight_scale_format = sys.argv[1:]
cfg = Config.model_validate({
    "model": {"architecture": architecture, "num_experts": 4},
    "numerics": {"scale_format": scale_format, "weight_scale_format": weight_scale_format},
    "run": {"backend": "cuda"},
})
batch = random_batch([30, 41, 9], fresh_generator(), 128)
engine = MegatronEngine(cfg)
engine.set_learning_rate(1e-3)

def check():
    masters, fp8 = {n: m.cpu() for n, m in engine.named_masters()}, 0
    for name, tensor, scale_inv in engine.named_local_weights():
        if scale_inv is None:
            assert torch.equal(tensor.cpu(), masters[name].bfloat16()), name
            continue
        fp8 += 1
        expected = quantize_blockwise(masters[name].bfloat16(), "e4m3", "128x128", power_2_scale=weight_scale_format == "pow2")
        assert torch.equal(tensor.cpu().view(torch.uint8), expected.codes.view(torch.uint8)), name
        assert torch.equal(scale_inv.cpu(), expected.scale_inv), name
    return fp8

assert check() == 2 * (2 + (8 if architecture == "qwen3_moe" else 2))
losses = [engine.train_step([batch], nll, trained_tokens([batch])).metrics["loss"] for _ in range(3)]
check()
assert losses[-1] < losses[0], losses
state = engine.state_dict()
last = engine.train_step([batch], nll, trained_tokens([batch])).metrics["loss"]
engine.load_state_dict(state)
check()
assert abs(engine.train_step([batch], nll, trained_tokens([batch])).metrics["loss"] - last) < 1e-3
print("ok", losses, last)
"""


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize(("scale_format", "weight_scale_format"), [("fp32", "fp32"), ("pow2", "pow2"), ("fp32", "pow2"), ("pow2", "fp32")])
def test_fp8_bytes_are_the_quantized_masters(architecture, scale_format, weight_scale_format):
    fp32_scales = "fp32" in (scale_format, weight_scale_format)
    run_fresh(SCRIPT, architecture, scale_format, weight_scale_format, fp32_scales=fp32_scales)


SHADOW = """
import sys
import torch
from e2e_fp8.config.root import Config
from e2e_fp8.training.engine import MegatronEngine
from training_cases import fresh_generator, nll, random_batch, trained_tokens

def config(precision):
    return Config.model_validate({
        "model": {"architecture": sys.argv[1], "num_experts": 4},
        "numerics": {"training_precision": precision},
        "run": {"backend": "cuda"},
    })

generator = fresh_generator()
engine = MegatronEngine(config("fp8"))
engine.set_learning_rate(1e-3)
batch = random_batch([30, 41, 9], generator)
for _ in range(2):
    engine.train_step([batch], nll, trained_tokens([batch]))
before = engine.token_stats([batch])[0].log_probs
shadow = engine.high_precision_token_stats([batch])[0].log_probs
assert torch.equal(engine.token_stats([batch])[0].log_probs, before)
assert not torch.equal(shadow, before)
twin = MegatronEngine(config("bf16"))
twin.load_state_dict(engine.state_dict(), weights_only=True)
assert torch.equal(twin.token_stats([batch])[0].log_probs, shadow)
engine.train_step([batch], nll, trained_tokens([batch]))
print("ok")
"""


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_the_shadow_pass_gives_the_log_probs_of_a_bf16_trainer(architecture):
    run_fresh(SHADOW, architecture)
