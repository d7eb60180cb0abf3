"""The critic on a Hopper GPU beside the policy, in a fresh process because Transformer Engine reads the scale kind when it is imported."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
from fresh_process import run_fresh

SCRIPT = """
import sys
from dataclasses import replace
import torch
from e2e_fp8.config.critic import CriticConfig
from e2e_fp8.config.root import Config
from e2e_fp8.numerics.blockwise import quantize_blockwise
from e2e_fp8.training.engine import MegatronEngine
from e2e_fp8.training.value_engine import ValueEngine
from training_cases import fresh_generator, random_batch, trained_tokens
from e2e_fp8.update.value import make_value_loss_fn

architecture, precision = sys.argv[1:]
cfg = Config.model_validate({
    "model": {"architecture": architecture, "num_experts": 4, "initializer_range": 0.05},
    "objective": {"kind": "ppo", "advantage": "gae", "critic": {"precision": precision, "learning_rate": 1e-3}},
    "run": {"backend": "cuda"},
})
batch = random_batch([30, 41, 9], fresh_generator(), cfg.model.vocab_size)
# no token twice: a critic cannot tell states apart whose prefixes repeat one token
tokens = torch.randperm(cfg.model.vocab_size)[:80]
targets = torch.where(batch.loss_mask.bool(), tokens.roll(-1), 0)
zeros = torch.zeros(80)
batch = replace(batch, token_ids=tokens, targets=targets, values=zeros, returns=torch.randn(80) * batch.loss_mask)
policy = MegatronEngine(cfg)
before = {n: m.clone() for n, m in policy.named_masters()}
critic = ValueEngine(cfg)
critic.start_from(policy.named_masters())
assert not critic.values([batch])[0].any()
assert critic.model.output_layer.weight.dtype == torch.float32
loss_fn = make_value_loss_fn(CriticConfig(value_clip=None))
step = lambda: critic.train_step([batch], loss_fn, trained_tokens([batch])).metrics["critic/vf_loss"]
losses = [step() for _ in range(40)]
assert min(losses[-10:]) < 0.05 * losses[0], losses
fp8, masters = 0, {n: m.cpu() for n, m in critic.named_masters()}
for name, tensor, scale_inv in critic.named_local_weights():
    if scale_inv is not None:
        fp8 += 1
        expected = quantize_blockwise(masters[name].bfloat16(), "e4m3", "128x128", power_2_scale=False)
        assert torch.equal(tensor.cpu().view(torch.uint8), expected.codes.view(torch.uint8)), name
assert fp8 == (0 if precision == "bf16" else 2 * (2 + (8 if architecture == "qwen3_moe" else 2)))
state = critic.state_dict()
last = step()
critic.load_state_dict(state)
assert abs(step() - last) < 1e-3 * losses[0]
assert all(torch.equal(m, before[n]) for n, m in policy.named_masters())
print("ok", losses, last)
"""


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_the_critic_fits_returns_beside_a_policy_that_does_not_move(architecture, precision):
    run_fresh(SCRIPT, architecture, precision)
