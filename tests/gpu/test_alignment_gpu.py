"""What ``numerics.alignment: aligned`` relies on at a GPU. Not run yet."""

import pytest
import torch

from e2e_fp8.training.log_probs import token_stats_from_logits

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("vocabulary", [112, 5003, 151_936])
def test_log_softmax_keeps_a_row_in_any_batch(vocabulary):
    logits = torch.randn(70, vocabulary, device="cuda") * 8
    whole = logits.log_softmax(-1)
    for rows in (1, 2, 17, 64):
        assert torch.equal(logits[5 : 5 + rows].clone().log_softmax(-1), whole[5 : 5 + rows])


def test_trainer_log_probs_are_the_samplers_at_a_temperature():
    """vLLM: ``logits.div_(temperature tensor)``, then ``log_softmax``, then the sampled token's."""
    logits, targets = torch.randn(33, 5003, device="cuda") * 4, torch.randint(0, 5003, (33,), device="cuda")
    expected = logits.clone().div_(torch.full((33, 1), 0.7, device="cuda")).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    found = token_stats_from_logits(logits, targets, temperature=0.7, vocab_size=5003, engine_temperature=True, engine_log_softmax=True)
    assert torch.equal(found.log_probs, expected)
