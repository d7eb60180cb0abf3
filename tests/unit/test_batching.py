"""Packing: exact round trips, alignment to predicted positions, refusals."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from e2e_fp8.errors import DataError
from e2e_fp8.orchestration.batching import minibatch_slices, pack_samples, pack_supervised, response_values, with_old_log_probs
from e2e_fp8.types import PackedBatch, Prompt, Sample

TOKEN = st.integers(1, 1000)
LOG_PROB = st.floats(-30, 0, width=32)


@st.composite
def sample_lists(draw):
    samples = []
    for i in range(draw(st.integers(1, 8))):
        prompt_ids = draw(st.lists(TOKEN, min_size=1, max_size=5))
        response = draw(st.lists(st.tuples(TOKEN, LOG_PROB), min_size=1, max_size=6))
        samples.append(make_sample(f"p{i}", prompt_ids, [t for t, _ in response], [lp for _, lp in response]))
    return samples


def make_sample(uid: str, prompt_ids, response_ids, log_probs) -> Sample:
    return Sample(
        prompt=Prompt(uid=uid, text="", token_ids=tuple(prompt_ids), answer=""),
        group_id=0,
        response_token_ids=tuple(response_ids),
        response_text="",
        rollout_log_probs=tuple(log_probs),
        routed_experts=None,
        finish_reason="stop",
        policy_version=0,
    )


def sequences_of(batches: list[PackedBatch]) -> list[tuple[PackedBatch, slice]]:
    return [(b, slice(start, end)) for b in batches for start, end in pairwise(b.cu_seqlens.tolist())]


@given(samples=sample_lists(), room=st.integers(0, 30))
def test_round_trip_is_exact_and_in_order(samples, room):
    longest = max(len(s.prompt.token_ids) + len(s.response_token_ids) for s in samples)
    advantages = torch.arange(1, len(samples) + 1, dtype=torch.float32)
    batches = pack_samples(samples, advantages, max_tokens=longest + room, device="cpu")
    rows = sequences_of(batches)
    assert len(rows) == len(samples)
    for (batch, at), sample, advantage in zip(rows, samples, advantages, strict=True):
        assert batch.token_ids[at].tolist() == [*sample.prompt.token_ids, *sample.response_token_ids]
        assert batch.position_ids[at].tolist() == list(range(at.stop - at.start))
        # a target is the next token of the same sequence
        assert batch.targets[at].tolist() == [*batch.token_ids[at].tolist()[1:], 0]
        assert batch.loss_mask[at][-1] == 0
        trained = batch.loss_mask[at] > 0
        assert batch.targets[at][trained].tolist() == list(sample.response_token_ids)
        assert int(trained.nonzero()[0]) == len(sample.prompt.token_ids) - 1
        assert batch.rollout_log_probs[at][trained].tolist() == list(sample.rollout_log_probs)
        assert batch.advantages[at][trained].tolist() == [float(advantage)] * len(sample.response_token_ids)
        assert not batch.advantages[at][~trained].any()
        assert not batch.rollout_log_probs[at][~trained].any()
    for values in ("targets", "rollout_log_probs"):
        back = response_values(batches, [getattr(b, values) for b in batches])
        expected = [s.response_token_ids if values == "targets" else s.rollout_log_probs for s in samples]
        assert [b.tolist() for b in back] == [list(e) for e in expected]


@given(samples=sample_lists(), room=st.integers(0, 30))
def test_micro_batches_are_full_and_within_the_limit(samples, room):
    limit = max(len(s.prompt.token_ids) + len(s.response_token_ids) for s in samples) + room
    batches = pack_samples(samples, torch.zeros(len(samples)), max_tokens=limit, device="cpu")
    for batch in batches:
        assert batch.cu_seqlens[0] == 0
        assert batch.cu_seqlens[-1] == batch.token_ids.numel() <= limit
    for batch, following in pairwise(batches):
        assert batch.token_ids.numel() + int(following.cu_seqlens[1]) > limit
    assert sum(int(b.loss_mask.sum()) for b in batches) == sum(len(s.response_token_ids) for s in samples)


def smallest_maximum(lengths: list[int], bins: int) -> int:
    """Over all ways to cut ``lengths`` into at most ``bins`` runs, the least largest sum."""
    if bins == 1 or len(lengths) == 1:
        return sum(lengths)
    return min(max(sum(lengths[:cut]), smallest_maximum(lengths[cut:], bins - 1)) for cut in range(1, len(lengths)))


@given(samples=sample_lists(), room=st.integers(0, 30), shares=st.integers(2, 4))
def test_micro_batches_for_several_ranks_are_as_equal_as_their_order_allows(samples, room, shares):
    lengths = [len(s.prompt.token_ids) + len(s.response_token_ids) for s in samples]
    limit, zeros = max(lengths) + room, torch.zeros(len(samples))
    alone = pack_samples(samples, zeros, max_tokens=limit, device="cpu")
    shared = pack_samples(samples, zeros, max_tokens=limit, device="cpu", shares=shares)
    most = -(-len(alone) // shares) * shares
    assert len(shared) <= most
    assert max(b.token_ids.numel() for b in shared) == smallest_maximum(lengths, most)
    for name in ("token_ids", "targets", "loss_mask", "rollout_log_probs"):
        assert torch.equal(torch.cat([getattr(b, name) for b in shared]), torch.cat([getattr(b, name) for b in alone]))


def test_worked_example_with_dtypes():
    samples = [make_sample("a", [5, 6, 7], [8, 9], [-0.5, -0.25]), make_sample("b", [1], [2], [-1.0])]
    (batch,) = pack_samples(samples, torch.tensor([2.0, -1.0]), max_tokens=7, device="cpu")
    expected = {
        "token_ids": ([5, 6, 7, 8, 9, 1, 2], torch.int64),
        "position_ids": ([0, 1, 2, 3, 4, 0, 1], torch.int64),
        "cu_seqlens": ([0, 5, 7], torch.int32),
        "targets": ([6, 7, 8, 9, 0, 2, 0], torch.int64),
        "loss_mask": ([0, 0, 1, 1, 0, 1, 0], torch.float32),
        "advantages": ([0, 0, 2, 2, 0, -1, 0], torch.float32),
        "rollout_log_probs": ([0, 0, -0.5, -0.25, 0, -1, 0], torch.float32),
        "old_log_probs": ([0] * 7, torch.float32),
    }
    for name, (values, dtype) in expected.items():
        tensor = getattr(batch, name)
        assert tensor.tolist() == values, name
        assert tensor.dtype == dtype, name
    assert batch.ref_log_probs is None


def test_old_log_probs_are_detached_and_zero_outside_the_mask():
    (batch,) = pack_samples([make_sample("a", [5, 6], [8], [-0.5])], torch.ones(1), max_tokens=3, device="cpu")
    log_probs = torch.tensor([float("nan"), -0.75, -float("inf")], dtype=torch.float64, requires_grad=True)
    filled = with_old_log_probs(batch, log_probs)
    assert filled.old_log_probs.tolist() == [0.0, -0.75, 0.0]
    assert filled.old_log_probs.dtype == torch.float32
    assert not filled.old_log_probs.requires_grad
    assert batch.old_log_probs.tolist() == [0.0, 0.0, 0.0]


@given(rows=st.lists(st.tuples(st.lists(TOKEN, min_size=1, max_size=4), st.lists(TOKEN, max_size=4)), min_size=1, max_size=6))
def test_supervised_rows_train_the_answer_and_the_end(rows):
    prompts = [Prompt(uid=f"p{i}", text="", token_ids=tuple(p), answer="") for i, (p, _) in enumerate(rows)]
    batches = pack_supervised(prompts, [a for _, a in rows], eos_token_id=0, max_tokens=12, device="cpu")
    back = response_values(batches, [b.targets for b in batches])
    assert [b.tolist() for b in back] == [[*answer, 0] for _, answer in rows]
    assert [int(b.token_ids[at][0]) for b, at in sequences_of(batches)] == [p[0] for p, _ in rows]


def test_a_sequence_that_does_not_fit_names_prompt_and_field():
    samples = [make_sample("short", [1], [2], [-1.0]), make_sample("chain_sum-17", [1, 2], [3, 4], [-1.0, -1.0])]
    with pytest.raises(DataError, match=r"chain_sum-17 .* 4 tokens, .*training\.max_tokens_per_microbatch 3"):
        pack_samples(samples, torch.zeros(2), max_tokens=3, device="cpu")
    assert len(pack_samples(samples, torch.zeros(2), max_tokens=4, device="cpu")) == 2


def test_an_empty_prompt_names_itself():
    with pytest.raises(DataError, match="prompt empty-3 has no tokens"):
        pack_samples([make_sample("empty-3", [], [2], [-1.0])], torch.zeros(1), max_tokens=3, device="cpu")


def test_misaligned_arrays_are_refused():
    with pytest.raises(ValueError, match="1 log-probs for 2 response tokens"):
        pack_samples([make_sample("a", [1], [2, 3], [-1.0])], torch.zeros(1), max_tokens=3, device="cpu")
    good = [make_sample("a", [1], [2], [-1.0])]
    with pytest.raises(ValueError, match="zip"):
        pack_samples(good, torch.zeros(2), max_tokens=3, device="cpu")
    batches = pack_samples(good, torch.zeros(1), max_tokens=3, device="cpu")
    with pytest.raises(ValueError, match="differ"):
        response_values(batches, [torch.zeros(3)])


@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=9), data=st.data())
def test_mini_batches_never_split_a_group(sizes, data):
    count = data.draw(st.integers(1, len(sizes)))
    group_ids = [g for g, size in enumerate(sizes) for _ in range(size)]
    parts = [group_ids[s] for s in minibatch_slices(group_ids, count)]
    assert [g for part in parts for g in part] == group_ids
    groups = [set(part) for part in parts]
    assert len(set.union(*groups)) == sum(len(g) for g in groups) == len(sizes)
    assert max(len(g) for g in groups) - min(len(g) for g in groups) <= 1
    assert len(groups) == count


def test_mini_batches_refuse_scattered_or_too_few_groups():
    with pytest.raises(ValueError, match="not consecutive"):
        minibatch_slices([0, 1, 0], 1)
    with pytest.raises(ValueError, match="cannot cut 2 groups into 3"):
        minibatch_slices([0, 1], 3)
