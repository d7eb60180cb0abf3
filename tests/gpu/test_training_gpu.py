"""The trainer on a Hopper GPU, in a fresh process because Transformer Engine reads the scale kind when it is imported."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import sys
import torch
from e2e_fp8.config.root import Config
from e2e_fp8.numerics.blockwise import quantize_blockwise
from e2e_fp8.training.engine import MegatronEngine
from e2e_fp8.types import PackedBatch

architecture, scale_format, weight_scale_format = sys.argv[1:]
cfg = Config.model_validate({
    "model": {"architecture": architecture, "num_experts": 4},
    "numerics": {"scale_format": scale_format, "weight_scale_format": weight_scale_format},
    "run": {"backend": "cuda"},
})
lengths = [30, 41, 9]
tokens = torch.randint(0, 128, (sum(lengths),))
cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
mask = torch.ones(len(tokens))
mask[(cu_seqlens[1:] - 1).long()] = 0
zeros = torch.zeros(len(tokens))
batch = PackedBatch(
    token_ids=tokens, position_ids=torch.cat([torch.arange(n) for n in lengths]), cu_seqlens=cu_seqlens, targets=tokens.roll(-1),
    loss_mask=mask, advantages=zeros, rollout_log_probs=zeros, old_log_probs=zeros,
)
nll = lambda stats, b: (-(stats.log_probs * b.loss_mask).sum(), {})
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
losses = [engine.train_step([batch], nll, float(mask.sum())).metrics["loss"] for _ in range(3)]
check()
assert losses[-1] < losses[0], losses
state = engine.state_dict()
last = engine.train_step([batch], nll, float(mask.sum())).metrics["loss"]
engine.load_state_dict(state)
check()
assert abs(engine.train_step([batch], nll, float(mask.sum())).metrics["loss"] - last) < 1e-3
print("ok", losses, last)
"""


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize(("scale_format", "weight_scale_format"), [("fp32", "fp32"), ("pow2", "pow2"), ("fp32", "pow2"), ("pow2", "fp32")])
def test_fp8_bytes_are_the_quantized_masters(architecture, scale_format, weight_scale_format):
    environment = {
        **os.environ,
        "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1" if "fp32" in (scale_format, weight_scale_format) else "0",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }
    command = [sys.executable, "-c", SCRIPT, architecture, scale_format, weight_scale_format]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    assert "ok" in result.stdout


SHADOW = """
import sys
import torch
sys.path.insert(0, "tests/unit")
from e2e_fp8.config.root import Config
from e2e_fp8.training.engine import MegatronEngine
from training_cases import nll, random_batch, trained_tokens

def config(precision):
    return Config.model_validate({
        "model": {"architecture": sys.argv[1], "num_experts": 4},
        "numerics": {"training_precision": precision},
        "run": {"backend": "cuda"},
    })

generator = torch.Generator()
print("seed", generator.seed())
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
    environment = {**os.environ, "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    result = subprocess.run([sys.executable, "-c", SHADOW, architecture], env=environment, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    assert "ok" in result.stdout
