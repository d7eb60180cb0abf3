"""Advantages and returns of one step with a critic, from samples: tool tokens, cut-off responses, KL in the reward, whitening."""

import math
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_batching import make_sample

from e2e_fp8.config.load import parse_config
from e2e_fp8.observability.names import check_names
from e2e_fp8.orchestration.batching import pack_samples
from e2e_fp8.orchestration.critic import with_gae
from e2e_fp8.types import PackedBatch, Sample

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from references import value_reference as reference

EPS = 2.0**-24


def config(whiten: bool = False, **objective):
    critic = {"gae_gamma": 0.9, "gae_lambda": 0.8, "whiten_advantages": whiten}
    return parse_config({"objective": {"kind": "ppo", "advantage": "gae", "critic": critic, **objective}})


@st.composite
def samples(draw) -> list[Sample]:
    found = []
    for i in range(draw(st.integers(1, 6))):
        count = draw(st.integers(1, 7))
        # a turn of the policy comes first; the last token may be a tool's when the window had no room for another turn
        mask = (True, *draw(st.lists(st.booleans(), min_size=count - 1, max_size=count - 1)))
        sample = make_sample(f"p{i}", [1] * draw(st.integers(1, 4)), range(2, 2 + count), [-0.5 * on for on in mask])
        reward, reason = draw(st.floats(-1, 1)), draw(st.sampled_from(["stop", "length"]))
        found.append(replace(sample, group_id=i, response_mask=mask, reward=reward, finish_reason=reason))
    return found


def batches_of(found: list[Sample], generator: torch.Generator) -> tuple[list[PackedBatch], list[torch.Tensor]]:
    """Packed with random old and reference log-probs, and random values of every position, NaN where none is asked for."""
    batches = pack_samples(found, torch.zeros(len(found)), max_tokens=14, device="cpu")

    def log_probs(batch: PackedBatch) -> torch.Tensor:
        return -torch.rand(batch.loss_mask.shape, generator=generator) * batch.loss_mask

    batches = [replace(b, old_log_probs=log_probs(b), ref_log_probs=log_probs(b)) for b in batches]
    values = [torch.randn(b.loss_mask.shape, generator=generator) for b in batches]
    return batches, [torch.where(b.loss_mask > 0, v, math.nan) for b, v in zip(batches, values, strict=True)]


def sequences(batches: list[PackedBatch], name: str) -> list[list[float]]:
    return [getattr(b, name)[s:e].double().tolist() for b in batches for s, e in pairwise(b.cu_seqlens.tolist())]


@given(found=samples(), seed=st.integers(0, 10_000), kl_coef=st.sampled_from([0.0, 0.3]), whiten=st.booleans())
def test_advantages_and_returns_are_those_of_the_scalar_reference(found, seed, kl_coef, whiten):
    cfg = config(whiten, kl_coef=kl_coef, kl_placement="reward", kl_estimator="k1")
    batches, values = batches_of(found, torch.Generator().manual_seed(seed))
    result, metrics = with_gae(cfg, found, batches, values)
    check_names(metrics)
    assert ("kl_ref" in metrics) == (kl_coef > 0)
    known = [v[s:e].double().tolist() for b, v in zip(batches, values, strict=True) for s, e in pairwise(b.cu_seqlens.tolist())]
    old, ref = (sequences(batches, name) for name in ("old_log_probs", "ref_log_probs"))
    rows = []
    for i, mask in enumerate(sequences(batches, "loss_mask")):
        trained, kl = [m > 0 for m in mask], [a - b for a, b in zip(old[i], ref[i], strict=True)]
        # samples carry Python floats, the step's rewards are float32
        rewards = reference.rewards_per_token(float(torch.tensor(found[i].reward)), kl, trained, kl_coef)
        rows.append(list(zip(rewards, known[i], trained, strict=True)))
    plain = [reference.advantages(row, 0.9, 0.8) for row in rows]
    # the KL is a float32 difference of log-probs below 1; its error enters each later advantage with a weight of at most 1
    slack = 8 * EPS * kl_coef
    for row, expected, ours in zip(rows, plain, sequences(result, "returns"), strict=True):
        for (_, value, trained), advantage, ret in zip(row, expected, ours, strict=True):
            assert ret == pytest.approx(advantage + value if trained else 0.0, rel=2 * EPS, abs=slack + 1e-12)
    flat = [a for row, expected in zip(rows, plain, strict=True) for (_, _, on), a in zip(row, expected, strict=True) if on]
    wanted = iter(reference.whiten(flat) if whiten else flat)
    spread = max(flat) - min(flat)
    if whiten and len(flat) > 1 and spread < 1e-3:
        return  # their order is then that of rounding errors
    # whitening divides errors of the advantages by their standard deviation, at least spread / (2 sqrt(n))
    factor = 4 * math.sqrt(len(flat)) / spread if whiten and len(flat) > 1 else 1.0
    for row, ours in zip(rows, sequences(result, "advantages"), strict=True):
        for (_, _, trained), advantage in zip(row, ours, strict=True):
            expected = next(wanted) if trained else 0.0
            assert advantage == pytest.approx(expected, rel=4 * EPS, abs=1e-11 + factor * (slack + 1e-12))


def test_a_cut_off_response_ends_as_any_other_and_a_tools_tokens_are_passed_over():
    """The value after the last token is 0 either way, and the reward goes back over the tool's two tokens undiscounted by them."""
    mask = (True, False, False, True)
    one = replace(make_sample("p", [1, 1], [2, 3, 4, 5], [-1.0, 0.0, 0.0, -1.0]), response_mask=mask, reward=1.0, finish_reason="length")
    batch = pack_samples([one], torch.zeros(1), max_tokens=8, device="cpu")[0]
    values = torch.tensor([9.0, 0.25, 9.0, 9.0, 0.5, 9.0])
    (result,), metrics = with_gae(config(), [one], [batch], [values])
    last = 1.0 - 0.5
    first = 0.9 * 0.5 - 0.25 + 0.9 * 0.8 * last
    assert result.advantages.tolist() == pytest.approx([0, first, 0, 0, last, 0])
    assert result.returns.tolist() == pytest.approx([0, first + 0.25, 0, 0, 1.0, 0])
    assert result.values.tolist() == [0, 0.25, 0, 0, 0.5, 0]
    assert (metrics["critic/rewards/mean"], metrics["critic/values/max"], metrics["critic/returns/max"]) == (1.0, 0.5, 1.0)


def test_overlong_punishment_is_part_of_the_reward():
    cfg = config(overlong_buffer_tokens=14)
    one = replace(make_sample("p", [1], [2, 3, 4], [-1.0] * 3), reward=1.0)
    batch = pack_samples([one], torch.zeros(1), max_tokens=8, device="cpu")[0]
    _, metrics = with_gae(cfg, [one], [batch], [torch.zeros(4)])
    assert metrics["reward/overlong_penalty"] == pytest.approx(-1 / 14)
    assert metrics["critic/rewards/mean"] == pytest.approx(1 - 1 / 14)


def test_whitening_is_over_the_whole_step_not_over_a_micro_batch():
    generator = torch.Generator().manual_seed(3)
    found = [replace(make_sample(f"p{i}", [1], [2, 3, 4], [-1.0] * 3), group_id=i, reward=float(i)) for i in range(6)]
    batches, values = batches_of(found, generator)
    assert len(batches) > 1
    result, _ = with_gae(config(whiten=True), found, batches, values)
    advantages = torch.cat([b.advantages[b.loss_mask > 0] for b in result]).double()
    assert float(advantages.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(advantages.std()) == pytest.approx(1.0, rel=1e-6)
    assert abs(float(result[0].advantages.sum())) > 0.1
