"""The frozen reference in its own precision on a Hopper GPU, in a fresh process: Transformer Engine reads the scale kind at import."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import sys
from pathlib import Path
import torch
from e2e_fp8.config.root import Config
from e2e_fp8.orchestration.session import Session
from e2e_fp8.training.engine import MegatronEngine
from e2e_fp8.types import PackedBatch

architecture, training, reference = sys.argv[1:]
cfg = Config.model_validate({
    "model": {"architecture": architecture, "num_experts": 4, "initializer_range": 0.05},
    "numerics": {"training_precision": training, "rollout_precision": training},
    "objective": {"kl_coef": 0.1, "reference_precision": reference},
    "run": {"backend": "cuda"},
})
lengths = [30, 41, 9]
tokens = torch.randint(0, cfg.model.vocab_size, (sum(lengths),))
cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
mask = torch.ones(len(tokens))
mask[(cu_seqlens[1:] - 1).long()] = 0
zeros = torch.zeros(len(tokens))
batch = PackedBatch(
    token_ids=tokens, position_ids=torch.cat([torch.arange(n) for n in lengths]), cu_seqlens=cu_seqlens, targets=tokens.roll(-1),
    loss_mask=mask, advantages=zeros, rollout_log_probs=zeros, old_log_probs=zeros,
)
policy = MegatronEngine(cfg)
policy.set_learning_rate(1e-3)

def step():
    return policy.train_step([batch], lambda stats, b: (-(stats.log_probs * b.loss_mask).sum(), {}), float(mask.sum()))

assert not step().skipped and not step().skipped
session = Session(cfg=cfg, task=None, trainer=policy, model_dir=Path())
session.make_reference()
frozen = session.reference.token_stats([batch])[0].log_probs
masters = dict(policy.named_masters())
assert all(torch.equal(m, masters[n]) for n, m in session.reference.named_masters())
fp8 = sum(scale_inv is not None for _, _, scale_inv in session.reference.named_local_weights())
assert (fp8 > 0) == (reference == "fp8"), fp8
own = policy.token_stats([batch])[0].log_probs
assert torch.isfinite(frozen).all()
assert torch.equal(frozen, own) == (training == reference)
if (training, reference) == ("fp8", "bf16"):
    high = policy.high_precision_token_stats([batch])[0].log_probs
    print("largest difference from the shadow pass", float((high - frozen).abs().max()))
    assert (high - frozen).abs().max() < (own - frozen).abs().max()
assert not step().skipped
assert torch.equal(session.reference.token_stats([batch])[0].log_probs, frozen)
print("ok", float((own - frozen).abs().mean()))
"""


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize(("training", "reference"), [("fp8", "bf16"), ("bf16", "fp8"), ("fp8", "fp8")])
def test_it_has_the_masters_of_the_policy_in_its_own_precision_and_stays(architecture, training, reference):
    environment = {**os.environ, "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    command = [sys.executable, "-c", SCRIPT, architecture, training, reference]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    assert "ok" in result.stdout
