"""Dynamic sampling: which groups of which rounds are trained on."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from e2e_fp8.observability.names import check_names
from e2e_fp8.orchestration.batching import minibatch_slices, pack_samples, with_advantages
from e2e_fp8.orchestration.collect import all_groups, is_degenerate, refill
from e2e_fp8.types import Prompt, Sample


def group(uid: str, group_id: int, rewards: list[float]) -> list[Sample]:
    prompt = Prompt(uid=uid, text="", token_ids=(1, 2), answer="")
    return [
        Sample(
            prompt=prompt,
            group_id=group_id,
            response_token_ids=(3,) * (1 + i),
            response_text="",
            rollout_log_probs=(-1.0,) * (1 + i),
            routed_experts=None,
            finish_reason="stop",
            policy_version=0,
            reward=reward,
        )
        for i, reward in enumerate(rewards)
    ]


def round_of(index: int, rows: list[list[float]]) -> list[Sample]:
    return [s for i, rewards in enumerate(rows) for s in group(f"{index}/{i}", i, rewards)]


@given(
    rounds=st.lists(
        st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=2, max_size=2), min_size=3, max_size=3), min_size=1, max_size=4
    )
)
def test_refill_keeps_the_first_informative_groups_in_order_and_counts_the_rest(rounds):
    asked = []

    def sample(index: int) -> list[Sample]:
        asked.append(index)
        return round_of(index, rounds[index])

    collected = refill(sample, wanted=3, rounds=len(rounds))
    informative = [f"{r}/{i}" for r in asked for i, rewards in enumerate(rounds[r]) if rewards[0] != rewards[1]]
    assert [s.prompt.uid for s in collected.kept[::2]] == informative[:3]
    assert [s.group_id for s in collected.kept] == [i // 2 for i in range(len(collected.kept))]
    assert asked == list(range(len(asked)))
    before = [u for u in informative if int(u[0]) < len(asked) - 1]
    assert len(asked) == len(rounds) or len(informative) >= 3
    assert len(before) < 3
    metrics = collected.metrics
    check_names(metrics)
    assert metrics["groups/total"] == 3 * len(asked) == len(collected.sampled) / 2
    assert metrics["groups/degenerate"] + len(informative) == metrics["groups/total"]
    assert metrics["groups/surplus"] == max(len(informative) - 3, 0)
    assert metrics["groups/missing"] == max(3 - len(informative), 0)
    assert metrics["groups/rounds"] == len(asked)


def test_no_signal_at_all_keeps_nothing_after_the_last_round():
    collected = refill(lambda index: round_of(index, [[1.0, 1.0], [0.0, 0.0]]), wanted=2, rounds=3)
    assert collected.kept == []
    assert collected.metrics["groups/missing"] == 2.0
    assert len(collected.sampled) == 12


def test_without_dynamic_sampling_every_group_stays():
    samples = round_of(0, [[1.0, 1.0], [0.0, 1.0]])
    collected = all_groups(samples)
    assert collected.kept == collected.sampled == samples
    assert collected.metrics == {"groups/degenerate": 1.0, "groups/total": 2.0}
    assert is_degenerate(samples[:2])
    assert not is_degenerate(samples[2:])


def test_kept_groups_can_be_packed_and_given_advantages():
    kept = refill(lambda index: round_of(index, [[1.0, 0.0], [0.0, 0.0]]), wanted=2, rounds=2).kept
    assert minibatch_slices([s.group_id for s in kept], 2) == [slice(0, 2), slice(2, 4)]
    batches = pack_samples(kept, torch.zeros(4), max_tokens=7, device="cpu")
    given_ = with_advantages(batches, torch.tensor([1.0, -1.0, 2.0, -2.0]))
    assert len(given_) == 2
    assert given_[0].advantages.tolist() == [0.0, 1.0, 0.0, 0.0, -1.0, -1.0, 0.0]
    assert given_[1].advantages.tolist() == [0.0, 2.0, 0.0, 0.0, -2.0, -2.0, 0.0]
    with pytest.raises(ValueError, match="3 advantages for 4 sequences"):
        with_advantages(batches, torch.zeros(3))
