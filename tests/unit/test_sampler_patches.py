"""Temperature and log-probs of vLLM's second model runner, replaced by the trainer's."""

import pytest
import torch

from e2e_fp8.patching import source_sha256
from e2e_fp8.rollout.sampler_patches import divide_by_temperature, is_live, sampler_patches, share_sampler, token_log_probs
from e2e_fp8.training.log_probs import token_stats_from_logits

CAUSES = ("log_softmax", "temperature")


@pytest.fixture
def modules():
    logprob = pytest.importorskip("vllm.v1.worker.gpu.sample.logprob")
    from vllm.v1.worker.gpu.sample import gumbel, states

    yield logprob, gumbel, states
    share_sampler(set())


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.3])
def test_rows_are_the_trainers(temperature):
    logits, targets = torch.randn(37, 1500) * 5, torch.randint(0, 1500, (37,))
    slots, temperatures = torch.randperm(60)[:37], torch.full((60,), temperature)
    expected = token_stats_from_logits(
        logits, targets, temperature=temperature, vocab_size=1500, engine_temperature=True, engine_log_softmax=True
    )
    divide_by_temperature(logits, slots, temperatures)
    assert torch.equal(token_log_probs(logits, targets[:, None])[:, 0], expected.log_probs)


def test_each_row_has_its_own_temperature_and_a_greedy_one_is_left_alone():
    logits, temperatures = torch.randn(4, 9), torch.tensor([0.5, 0.0, 2.0, 1.0])
    slots = torch.tensor([2, 1, 0, 1])
    found = logits.clone()
    divide_by_temperature(found, slots, temperatures)
    for row, slot in enumerate(slots.tolist()):
        assert torch.equal(found[row], logits[row] if slot == 1 else logits[row] / temperatures[slot : slot + 1])


def test_each_is_put_in_place_and_given_back_alone(modules):
    logprob, gumbel, states = modules
    upstream = logprob.compute_token_logprobs, gumbel.apply_temperature
    assert [is_live(cause) for cause in CAUSES] == [False, False]
    share_sampler({"temperature"})
    assert (gumbel.apply_temperature, states.apply_temperature) == (divide_by_temperature, divide_by_temperature)
    assert [is_live(cause) for cause in CAUSES] == [False, True]
    share_sampler({"log_softmax"})
    share_sampler({"log_softmax"})
    assert logprob.compute_token_logprobs is token_log_probs
    assert (gumbel.apply_temperature, states.apply_temperature) == (upstream[1], upstream[1])
    assert [is_live(cause) for cause in CAUSES] == [True, False]
    share_sampler(set())
    assert (logprob.compute_token_logprobs, gumbel.apply_temperature) == upstream


def test_the_replaced_sources_are_the_reviewed_ones(modules):
    logprob, gumbel, _ = modules
    patches = sampler_patches()
    assert source_sha256(logprob.compute_token_logprobs) == patches["log_softmax"].source_sha256
    assert source_sha256(gumbel.apply_temperature) == patches["temperature"].source_sha256
