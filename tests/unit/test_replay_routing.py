"""Which recorded routing may be replayed, how it is packed beside the tokens, and what is counted."""

from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from e2e_fp8.config.root import Config
from e2e_fp8.errors import ConfigError, EngineError
from e2e_fp8.observability.names import check_names
from e2e_fp8.orchestration.batching import pack_samples
from e2e_fp8.orchestration.episodes import joined
from e2e_fp8.orchestration.replay import changed_metrics, coverage_metrics, routing_of
from e2e_fp8.rollout.environment import CAPTURE_GATE_WEIGHTS, check_environment, rollout_environment
from e2e_fp8.rollout.sampling import split_record
from e2e_fp8.types import Prompt, ReplayCounts, Sample

LAYERS, EXPERTS, K = 2, 5, 3


def config(mode: str = "R3", uncovered: str = "mask", **sections) -> Config:
    model = {"num_hidden_layers": LAYERS, "num_experts": EXPERTS, "num_experts_per_tok": K} | sections.pop("model", {})
    training = {"router_replay": {"mode": mode, "uncovered": uncovered}} | sections.pop("training", {})
    return Config.model_validate({"model": model, "training": training, **sections})


@cache
def plain_config(mode: str) -> Config:
    return config(mode)


def make_sample(prompt: int, response: int, rows, weights=None, mask=None, **more) -> Sample:
    return Sample(
        prompt=Prompt(uid=f"p{prompt}", text="", token_ids=tuple(range(prompt)), answer=""),
        group_id=0,
        response_token_ids=tuple(range(20, 20 + response)),
        response_text="",
        rollout_log_probs=(-1.0,) * response,
        routed_experts=rows,
        routed_weights=weights,
        finish_reason="stop",
        policy_version=0,
        response_mask=mask,
        **more,
    )


@st.composite
def samples(draw):
    """Samples whose routing may be whole, short, absent, or full of what no router chooses."""
    prompt, response = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    mask = draw(st.none() | st.lists(st.booleans(), min_size=response, max_size=response).map(tuple))
    count = draw(st.sampled_from([None, 0, prompt + response - 1, prompt + response, draw(st.integers(0, prompt + response))]))
    if count is None:
        return make_sample(prompt, response, None, None, mask)
    # drawn one by one, hypothesis would spend its time on entries
    random = numpy.random.default_rng(draw(st.integers(0, 2**32)))
    rows = random.random((count, LAYERS, EXPERTS)).argsort(axis=2)[:, :, :K].astype(numpy.uint8)
    weights = random.random(rows.shape, dtype=numpy.float32)
    # duplicates and experts that do not exist, and weights that are none, in a tenth of the rows
    rows[random.random(rows.shape[:2]) < 0.1] = random.integers(0, EXPERTS + 2, K)
    weights[random.random(rows.shape) < 0.02] = random.choice([numpy.nan, numpy.inf, -0.25])
    return make_sample(prompt, response, rows, weights, mask)


def slow_covered(sample: Sample, with_weights: bool) -> list[list[bool]]:
    """Token by token: recorded, of experts that exist, each once, and with usable weights."""
    length, found = len(sample.prompt.token_ids) + len(sample.response_token_ids), []
    for t in range(length):
        row = []
        for layer in range(LAYERS):
            ok = sample.routed_experts is not None and t < len(sample.routed_experts)
            if ok:
                ids = [int(e) for e in sample.routed_experts[t][layer]]
                ok = len(set(ids)) == K and max(ids) < EXPERTS
            if ok and with_weights:
                ok = all(0 <= float(w) < float("inf") for w in sample.routed_weights[t][layer])
            row.append(bool(ok))
        found.append(row)
    return found


@given(sample=samples(), mode=st.sampled_from(["R3", "R3_weights_order"]))
def test_only_usable_rows_are_covered(sample, mode):
    routing = routing_of(sample, plain_config(mode))
    expected = slow_covered(sample, mode == "R3_weights_order")
    assert routing.covered.tolist() == expected
    assert routing.replayed.tolist() == [all(all(row) for row in expected[: t + 1]) for t in range(len(expected))]
    assert (routing.weights is None) == (mode == "R3")
    for t, layer in routing.covered.nonzero().tolist():
        assert routing.ids[t, layer].tolist() == sample.routed_experts[t][layer].tolist()
        if routing.weights is not None:
            assert routing.weights[t, layer].tolist() == sample.routed_weights[t][layer].tolist()


@given(batch=st.lists(samples(), min_size=1, max_size=5), room=st.integers(0, 20), mask=st.booleans())
def test_routing_is_packed_beside_its_tokens_and_uncovered_tokens_leave_the_loss(batch, room, mask):
    cfg = plain_config("R3_weights_order")
    routings = [routing_of(s, cfg) for s in batch]
    longest = max(len(s.prompt.token_ids) + len(s.response_token_ids) for s in batch)
    plain = pack_samples(batch, torch.ones(len(batch)), max_tokens=longest + room, device="cpu")
    packed = pack_samples(batch, torch.ones(len(batch)), max_tokens=longest + room, device="cpu", routings=routings, mask_uncovered=mask)
    rows = [(b, p, slice(*at)) for b, p in zip(packed, plain, strict=True) for at in pairwise(b.cu_seqlens.tolist())]
    for (b, p, at), sample, routing in zip(rows, batch, routings, strict=True):
        assert torch.equal(b.token_ids[at], p.token_ids[at])
        assert torch.equal(b.routed_experts[at], routing.ids)
        assert torch.equal(b.routed_weights[at], routing.weights)
        assert torch.equal(b.replay_mask[at], routing.covered)
        covered, start = slow_covered(sample, True), len(sample.prompt.token_ids) - 1
        for t, (ours, before) in enumerate(zip(b.loss_mask[at].tolist(), p.loss_mask[at].tolist(), strict=True)):
            replayed = all(all(row) for row in covered[: t + 1])
            assert ours == (before if replayed or not mask else 0.0)
            assert t >= start or not ours
        for values in (b.advantages[at], b.rollout_log_probs[at]):
            assert not values[b.loss_mask[at] == 0].any()
    assert all(p.routed_experts is p.routed_weights is p.replay_mask is None for p in plain)


@given(batch=st.lists(samples(), min_size=1, max_size=5), masked=st.booleans())
def test_coverage_is_counted_token_by_token(batch, masked):
    cfg = plain_config("R3_weights_order")
    found = coverage_metrics(batch, [routing_of(s, cfg) for s in batch], masked=masked)
    check_names(found)
    count = dict.fromkeys(("trained", "uncovered", "prompt", "tool", "last", "partial", "missing"), 0)
    for sample in batch:
        covered = [all(row) for row in slow_covered(sample, True)]
        start = len(sample.prompt.token_ids) - 1
        count["prompt"] += sum(not c for c in covered[:start])
        count["last"] += not covered[-1]
        count["missing"] += sample.routed_experts is None
        count["partial"] += sample.routed_experts is not None and not all(covered[:-1])
        for j in range(len(sample.response_token_ids)):
            trained = sample.response_mask is None or sample.response_mask[j]
            count["trained"] += trained
            count["uncovered"] += trained and not all(covered[: start + j + 1])
            count["tool"] += not trained and not covered[start + j]
    expected = {
        "coverage": 1 - count["uncovered"] / max(count["trained"], 1),
        "uncovered_tokens": count["uncovered"],
        "uncovered_prompt_tokens": count["prompt"],
        "uncovered_tool_tokens": count["tool"],
        "last_tokens": count["last"],
        "masked_tokens": count["uncovered"] * masked,
        "partial_samples": count["partial"],
        "missing_samples": count["missing"],
    }
    assert found == {f"router_replay/{name}": value for name, value in expected.items()}


def test_what_the_engine_tells_of_cache_and_preemption_is_counted():
    row = numpy.tile(numpy.arange(K, dtype=numpy.uint8), (4, LAYERS, 1))
    told = [make_sample(3, 2, row, cached_tokens=2, preemptions=n) for n in (0, 3, 1)]
    cfg = config()
    found = coverage_metrics(told, [routing_of(s, cfg) for s in told], masked=True)
    assert found["router_replay/prefix_cache_tokens"] == 6.0
    assert found["router_replay/preempted_samples"] == 2.0
    assert found["router_replay/coverage"] == 1.0
    silent = [make_sample(3, 2, row)]
    assert "router_replay/preempted_samples" not in coverage_metrics(silent, [routing_of(s, cfg) for s in silent], masked=True)


def test_changed_choices_by_layer():
    found = changed_metrics(ReplayCounts(changed={0: 1.0, 3: 3.0}, assigned={0: 4.0, 3: 6.0}))
    check_names(found)
    assert found == {"router_replay/changed_ids": 0.4, "router_replay/changed_ids/layer_0": 0.25, "router_replay/changed_ids/layer_3": 0.5}
    assert changed_metrics(None) == changed_metrics(ReplayCounts(changed={0: 0.0}, assigned={0: 0.0})) == {}


def test_turns_keep_the_routing_that_their_log_probs_came_of():
    def numbered(first: int, rows: int) -> numpy.ndarray:
        return numpy.arange(first, first + rows, dtype=numpy.uint8)[:, None, None].repeat(LAYERS, 1).repeat(K, 2)

    first = make_sample(2, 3, numbered(0, 4), numbered(0, 4).astype("float32"), cached_tokens=1, preemptions=1)
    prompt = replace(first.prompt, token_ids=(*first.prompt.token_ids, *first.response_token_ids, 9, 9))
    then = replace(make_sample(2, 2, numbered(100, 8), numbered(100, 8).astype("float32"), preemptions=0), prompt=prompt)
    both = joined(first, (9, 9), then)
    # prompt and two response tokens by the first turn; its last token, the tool's two and one more by the second
    assert both.routed_experts[:, 0, 0].tolist() == [0, 1, 2, 3, 104, 105, 106, 107]
    assert both.routed_weights[:, 1, 2].tolist() == [0, 1, 2, 3, 104, 105, 106, 107]
    assert (both.cached_tokens, both.preemptions) == (1, 1)
    assert joined(replace(first, routed_experts=None, routed_weights=None), (9, 9), then).routed_experts is None


def test_records_that_do_not_fit_are_refused():
    row = numpy.tile(numpy.arange(K, dtype=numpy.uint8), (4, LAYERS, 1))
    with pytest.raises(EngineError, match="2 layers and 3 experts a token"):
        routing_of(make_sample(3, 2, row[:, :1]), config())
    with pytest.raises(EngineError, match="of 3 tokens"):
        routing_of(make_sample(2, 1, row), config())
    with pytest.raises(EngineError, match=f"{CAPTURE_GATE_WEIGHTS}=1"):
        routing_of(make_sample(3, 2, row), config("R3_weights_order"))
    with pytest.raises(EngineError, match="float64"):
        routing_of(make_sample(3, 2, row, numpy.ones(row.shape)), config("R3_weights_order"))


def test_a_record_with_weights_is_split_into_the_same_bits():
    generator = numpy.random.default_rng()
    ids = generator.integers(0, 300, (5, LAYERS, K)).astype(numpy.uint32)
    weights = generator.random((5, LAYERS, K), dtype=numpy.float32)
    found = split_record(numpy.concatenate([ids, weights.view(numpy.uint32)], axis=1), LAYERS)
    assert (found[0] == ids).all()
    assert found[1].dtype == numpy.float32
    assert found[1].tobytes() == weights.tobytes()
    alone = ids.astype(numpy.uint8)
    assert split_record(alone, LAYERS) == (alone, None)
    assert split_record(None, LAYERS) == (None, None)
    with pytest.raises(ValueError, match="routing record"):
        split_record(ids.repeat(3, axis=1), LAYERS)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model": {"architecture": "qwen3"}}, "training.router_replay.mode is R3, but qwen3 has no router: set it to disabled"),
        ({"rollout": {"capture_routed_experts": False}}, "rollout.capture_routed_experts is false"),
        ({"model": {"num_experts_per_tok": 1}}, "cannot be told from expert 0"),
        (
            {
                "rollout": {"placement": "server"},
                "sync": {"transport": "ipc"},
                "numerics": {"training_precision": "bf16", "rollout_precision": "bf16"},
                "run": {"backend": "cpu"},
            },
            "set rollout.placement to in_process",
        ),
    ],
)
def test_what_replay_needs_is_checked_when_the_file_is_parsed(change, sentence):
    assert config("disabled", **change).training.router_replay.enabled is False
    with pytest.raises(ConfigError, match=sentence):
        config("R3", **change)


def test_the_order_of_slots_needs_the_shared_combine_in_a_layer_of_shared_operators():
    open_combine = {"numerics": {"alignment": "bitwise", "alignment_overrides": {"combine": "native"}}}
    config("R3", **open_combine)
    config("R3_weights_order", numerics={"alignment": "bitwise"})
    with pytest.raises(ConfigError, match=r"R3_weights_order, but .* shares swiglu .* and not combine.*overrides\.combine to shared"):
        config("R3_weights_order", **open_combine)


def test_gate_weights_are_recorded_only_where_they_are_replayed():
    for device in ("cpu", "cuda"):
        assert CAPTURE_GATE_WEIGHTS not in rollout_environment(config("R3"), device=device)
        assert rollout_environment(config("R3_weights_order"), device=device)[CAPTURE_GATE_WEIGHTS] == "1"
        with pytest.raises(ConfigError, match="which vLLM then has to record"):
            check_environment(config("R3_weights_order"), {CAPTURE_GATE_WEIGHTS: "0"}, device=device)
