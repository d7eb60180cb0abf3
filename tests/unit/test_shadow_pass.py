"""The shadow pass: BF16 log-probs from an FP8 trainer's masters, and clip ranges from them, on real engines."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from training_cases import fresh_generator, nll, random_batch, small_config, trained_tokens

from e2e_fp8.config.objective import ObjectiveConfig
from e2e_fp8.config.root import Config
from e2e_fp8.correction.sequences import Sequences
from e2e_fp8.errors import ConfigError
from e2e_fp8.observability.timers import PhaseTimer
from e2e_fp8.orchestration.shadow_pass import ClipState, ShadowPass, due_minibatches, in_use
from e2e_fp8.training.engine import MegatronEngine
from e2e_fp8.types import PackedBatch
from e2e_fp8.update.loss_fn import make_loss_fn

LENGTHS = [9, 17, 5, 12]


def log_probs(stats) -> list[torch.Tensor]:
    return [s.log_probs for s in stats]


def trained_engine(architecture: str, generator: torch.Generator) -> MegatronEngine:
    """After two FP8 steps, so that the masters are no BF16 numbers."""
    engine = MegatronEngine(small_config(architecture))
    engine.set_learning_rate(5e-3)
    for _ in range(2):
        batch = random_batch(LENGTHS, generator)
        engine.train_step([batch], nll, trained_tokens([batch]))
    return engine


def bf16_twin(engine: MegatronEngine, architecture: str) -> MegatronEngine:
    """Another engine, BF16 throughout, with the same masters."""
    twin = MegatronEngine(small_config(architecture, "bf16"))
    twin.load_state_dict(engine.state_dict(), weights_only=True)
    return twin


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_shadow_log_probs_are_those_of_a_bf16_engine_with_the_same_masters_bit_for_bit(architecture):
    generator = fresh_generator()
    engine = trained_engine(architecture, generator)
    batches = [random_batch(LENGTHS, generator), random_batch([31], generator)]
    before = engine.token_stats(batches)
    shadow = engine.high_precision_token_stats(batches)
    for ours, theirs in zip(shadow, bf16_twin(engine, architecture).token_stats(batches), strict=True):
        assert torch.equal(ours.log_probs, theirs.log_probs)
        assert torch.equal(ours.entropy, theirs.entropy)
    # the pass leaves nothing behind, and FP8 is something else
    for first, second, high in zip(before, engine.token_stats(batches), shadow, strict=True):
        assert torch.equal(first.log_probs, second.log_probs)
        assert not torch.equal(first.log_probs, high.log_probs)


def test_an_error_inside_the_pass_leaves_the_linears_in_fp8():
    generator = fresh_generator()
    engine = trained_engine("qwen3", generator)
    batch = random_batch(LENGTHS, generator)
    before = engine.token_stats([batch])[0].log_probs
    with pytest.raises(IndexError):
        engine.high_precision_token_stats([replace(batch, token_ids=batch.token_ids + 10_000)])
    assert torch.equal(engine.token_stats([batch])[0].log_probs, before)


@given(interval=st.integers(1, 9), sizes=st.lists(st.integers(1, 5), min_size=1, max_size=30))
def test_a_pass_comes_as_soon_as_the_interval_is_over_and_the_minibatch_is_off_policy(interval, sizes):
    since, clock, passes, on_policy = 0, 0, [], set()
    for count in sizes:
        due = due_minibatches(interval, since, count)
        on_policy.add(clock + 1)
        passes += [clock + 1 + i for i in due]
        clock += count
        since = clock - passes[-1] if passes else clock
    for last, this in pairwise([0, *passes]):
        # nothing between the end of the interval and the pass but first mini-batches
        assert this not in on_policy
        assert set(range(last + interval, this)) <= on_policy
    assert set(range((passes[-1] if passes else 0) + interval, clock + 1)) <= on_policy
    assert due_minibatches(0, 100, 5) == []


def minibatches(generator: torch.Generator, engine: MegatronEngine) -> list[list[PackedBatch]]:
    """Two mini-batches of two micro-batches with old log-probs and one advantage for each sequence."""
    parts = []
    for _ in range(2):
        batches = [random_batch(LENGTHS, generator), random_batch([14, 7], generator)]
        filled = []
        for batch, old in zip(batches, log_probs(engine.token_stats(batches)), strict=True):
            ids = Sequences.of(batch.loss_mask, batch.cu_seqlens).ids
            advantages = torch.randn(len(batch.cu_seqlens) - 1, generator=generator)[ids]
            filled.append(replace(batch, advantages=advantages * batch.loss_mask, old_log_probs=old * batch.loss_mask))
        parts.append(filled)
    return parts


def ratios(part: list[PackedBatch], now: list[torch.Tensor], old: list[torch.Tensor], per_sequence: bool) -> list[float]:
    """Ratios of tokens, or sequences, with a negative advantage, in plain loops."""
    found = []
    for batch, current, before in zip(part, now, old, strict=True):
        for start, end in pairwise(batch.cu_seqlens.tolist()):
            trained = [t for t in range(start, end) if batch.loss_mask[t] > 0]
            if not float(batch.advantages[start]) < 0:
                continue
            logs = [current[t] - before[t] for t in trained]
            found += [float((sum(logs) / len(logs)).exp())] if per_sequence else [float(log.exp()) for log in logs]
    return found


@pytest.mark.parametrize("kind", ["grpo", "gspo"])
def test_ranges_move_to_clip_as_many_in_fp8_as_a_bf16_engine_would(kind):
    """The high-precision side comes from a BF16 engine with the masters before and after the first update."""
    generator = fresh_generator()
    engine = trained_engine("qwen3", generator)
    parts = minibatches(generator, engine)
    per_sequence = kind == "gspo"
    calibration = {"interval": 2, "min_factor": 1e-6, "max_factor": 1e6}
    objective = ObjectiveConfig(kind=kind, clip_low=1e-3 if per_sequence else 0.02, clip_high=0.03, calibration=calibration)
    old_high = log_probs(bf16_twin(engine, "qwen3").token_stats(parts[1]))
    timer = PhaseTimer()
    shadow = ShadowPass(objective, engine, parts, ClipState(), timer)
    assert shadow.objective_for(0, parts[0]) is objective
    correction = small_config().correction
    engine.train_step(parts[0], make_loss_fn(objective, correction), trained_tokens(parts[0]))

    high = ratios(parts[1], log_probs(bf16_twin(engine, "qwen3").token_stats(parts[1])), old_high, per_sequence)
    fp8 = ratios(parts[1], log_probs(engine.token_stats(parts[1])), [b.old_log_probs for b in parts[1]], per_sequence)
    moved = shadow.objective_for(1, parts[1])
    metrics = {name.removeprefix("clip_calibration/"): value for name, value in shadow.metrics().items()}
    assert timer.seconds()["shadow_pass"] > 0
    assert shadow.state.steps_since == 0
    if not fp8:
        assert moved is objective
        return
    wanted = sum(r < 1 - objective.clip_low for r in high)
    # a mean's last bit may differ from the plain sum's, so counts may differ where a ratio lies within that of a bound
    near = sum(abs(r - (1 - objective.clip_low)) < 1e-6 for r in high + fp8)
    assert abs(metrics["high_precision"] * len(high) - wanted) <= near + 1e-9
    assert abs(metrics["fp8_configured"] * len(fp8) - sum(r < 1 - objective.clip_low for r in fp8)) <= near + 1e-9
    ordered = sorted(fp8)
    gap = ordered[wanted] - ordered[wanted - 1] if 0 < wanted < len(ordered) else 1.0
    if near == 0 and gap > 1e-5 and (wanted == 0 or ordered[wanted - 1] < 1 - 1e-5):
        assert metrics["fp8_calibrated"] == metrics["high_precision"]
        assert sum(r < 1 - moved.clip_low for r in fp8) == wanted
    assert moved.clip_high / moved.clip_low == pytest.approx(objective.clip_high / objective.clip_low)
    assert (metrics["clip_low"], metrics["clip_high"], metrics["passes"]) == (moved.clip_low, moved.clip_high, 1.0)
    assert in_use(objective, ClipState.from_state_dict(shadow.state.state_dict()).factor) == moved


def test_a_resumed_run_obeys_its_own_configuration():
    state = ClipState.from_state_dict({"steps_since": 3, "factor": 4.0})
    assert in_use(ObjectiveConfig(clip_low=0.1, calibration={"interval": 5}), state.factor).clip_low == 0.1 * 4.0
    assert in_use(ObjectiveConfig(clip_low=0.1, calibration={"interval": 5, "max_factor": 2.0}), state.factor).clip_low == 0.1 * 2.0
    off = ObjectiveConfig(clip_low=0.1)
    assert in_use(off, state.factor) is off


@pytest.mark.parametrize(("limits", "factor"), [({"max_factor": 1.0}, 1.0), ({"min_factor": 1.0, "max_factor": 3.0}, 3.0)])
def test_bounds_hold_and_low_alone_moves_where_asked(limits, factor):
    """All advantages negative and the FP8 ratios far below the BF16 ones' bound: the range wants to grow past any limit."""
    generator = fresh_generator()
    engine = trained_engine("qwen3", generator)
    parts = minibatches(generator, engine)
    # old FP8 log-probs shifted by 5 nats: every FP8 ratio is exp(-5), while the BF16 ratios are 1
    second = [replace(b, advantages=-b.loss_mask, old_log_probs=(b.old_log_probs + 5) * b.loss_mask) for b in parts[1]]
    objective = ObjectiveConfig(clip_low=0.1, clip_high=0.2, calibration={"interval": 1, "ranges": "low", **limits})
    shadow = ShadowPass(objective, engine, [parts[0], second], ClipState(), PhaseTimer())
    shadow.objective_for(0, parts[0])
    moved = shadow.objective_for(1, second)
    assert (moved.clip_low, moved.clip_high) == (0.1 * factor, 0.2)
    metrics = shadow.metrics()
    assert metrics["clip_calibration/high_precision"] == 0.0
    assert metrics["clip_calibration/fp8_configured"] == metrics["clip_calibration/fp8_calibrated"] == 1.0


def test_a_ratio_that_is_not_finite_moves_nothing_and_is_counted():
    generator = fresh_generator()
    engine = trained_engine("qwen3", generator)
    parts = minibatches(generator, engine)
    broken = [replace(b, old_log_probs=b.old_log_probs * float("nan")) for b in parts[1]]
    objective = ObjectiveConfig(calibration={"interval": 2})
    shadow = ShadowPass(objective, engine, [parts[0], broken], ClipState(factor=0.5), PhaseTimer())
    shadow.objective_for(0, parts[0])
    assert shadow.objective_for(1, broken).clip_low == 0.1
    assert shadow.metrics()["clip_calibration/refused"] == 1.0
    assert "clip_calibration/high_precision" not in shadow.metrics()


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"objective": {"kind": "cispo"}}, "objective.kind cispo has no clipped ratio"),
        ({"numerics": {"training_precision": "bf16"}}, "training_precision is bf16"),
        ({"correction": {"preset": "bypass_ppo_clip"}}, "correction.bypass_mode is true"),
        ({"training": {"minibatches_per_step": 1}}, "minibatches_per_step is 1"),
        ({"objective": {"kind": "ppo", "dual_clip": 1.5}}, "lower objective.calibration.max_factor"),
    ],
)
def test_what_cannot_be_calibrated_is_refused_when_the_file_is_read(sections, message):
    base = {"training": {"minibatches_per_step": 2}, "objective": {}, **sections}
    base["objective"] = {**base["objective"], "calibration": {"interval": 20}}
    with pytest.raises(ConfigError, match=message):
        Config.model_validate(base)
