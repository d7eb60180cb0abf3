"""The frozen reference in its own precision on a Hopper GPU, in a fresh process: Transformer Engine reads the scale kind at import."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
from fresh_process import run_fresh

SCRIPT = """
import sys
from pathlib import Path
import torch
from e2e_fp8.config.root import Config
from e2e_fp8.orchestration.session import Session
from e2e_fp8.training.engine import MegatronEngine
from training_cases import fresh_generator, nll, random_batch, trained_tokens

architecture, training, reference = sys.argv[1:]
cfg = Config.model_validate({
    "model": {"architecture": architecture, "num_experts": 4, "initializer_range": 0.05},
    "numerics": {"training_precision": training, "rollout_precision": training},
    "objective": {"kl_coef": 0.1, "reference_precision": reference},
    "run": {"backend": "cuda"},
})
batch = random_batch([30, 41, 9], fresh_generator(), cfg.model.vocab_size)
policy = MegatronEngine(cfg)
policy.set_learning_rate(1e-3)

def step():
    return policy.train_step([batch], nll, trained_tokens([batch]))

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
    run_fresh(SCRIPT, architecture, training, reference)
