"""Old log-probs taken from the engine after an audit: the same bits as a pass over everything, and what a difference does.

The engine's log-probs are those of the trainer itself, one sequence at a time: with ``numerics.alignment: bitwise`` the two are equal.
"""

import math
import random
import time
from dataclasses import fields, replace

import pytest
import torch
from training_cases import VOCAB, fresh_generator, nll, random_batch, small_config, trained_tokens

from e2e_fp8.config.root import Config
from e2e_fp8.errors import ConfigError
from e2e_fp8.observability.timers import PhaseTimer
from e2e_fp8.orchestration.batching import pack_samples, response_values
from e2e_fp8.orchestration.old_log_probs import differing, packed, sampled
from e2e_fp8.orchestration.rl_step import _train_on
from e2e_fp8.orchestration.scoring import score
from e2e_fp8.orchestration.session import Session
from e2e_fp8.training.engine import MegatronEngine
from e2e_fp8.types import PackedBatch, Prompt, Sample

GROUP = 4


def config(**training) -> Config:
    base = small_config("qwen3_moe", numerics={"alignment": "bitwise"}).model_dump(mode="json")
    base["training"] |= {"max_tokens_per_microbatch": 256, "learning_rate": 3e-3, **training}
    base["correction"] = {"preset": "decoupled_token_is"}
    return Config.model_validate(base)


def with_correction(cfg: Config, preset: str) -> Config:
    return Config.model_validate(cfg.model_dump(mode="json") | {"correction": {"preset": preset}})


def session_of(cfg: Config, state: dict | None = None) -> Session:
    """A trainer alone; scoring and updates need neither task nor engine."""
    trainer = MegatronEngine(cfg)
    if state is not None:
        trainer.load_state_dict(state)
    return Session(cfg=cfg, task=None, trainer=trainer, model_dir=None)  # type: ignore[arg-type]


def samples_of(session: Session, groups: int, seed: int | None = None) -> list[Sample]:
    rng = random.Random(seed if seed is not None else fresh_generator().initial_seed())
    samples = []
    for group in range(groups):
        prompt = Prompt(uid=f"p{group}", text="", token_ids=tuple(rng.choices(range(VOCAB), k=rng.randint(2, 9))), answer="")
        for _ in range(GROUP):
            response = tuple(rng.choices(range(VOCAB), k=rng.randint(1, 12)))
            samples.append(
                Sample(
                    prompt=prompt, group_id=group, response_token_ids=response, response_text="", rollout_log_probs=(0.0,) * len(response),
                    routed_experts=None, finish_reason="stop", policy_version=session.trainer.policy_version, reward=rng.random(),
                )
            )  # fmt: skip
    return with_engine_log_probs(session, samples)


def with_engine_log_probs(session: Session, samples: list[Sample]) -> list[Sample]:
    filled = []
    for sample in samples:
        (batch,) = pack_samples([sample], torch.zeros(1), max_tokens=256, device="cpu")
        (values,) = response_values([batch], [session.trainer.token_stats([batch])[0].log_probs])
        filled.append(replace(sample, rollout_log_probs=tuple(values.tolist())))
    return filled


def one_bit_off(sample: Sample) -> Sample:
    first = torch.tensor(sample.rollout_log_probs[0])
    moved = float(torch.nextafter(first, torch.tensor(-math.inf)))
    return replace(sample, rollout_log_probs=(moved, *sample.rollout_log_probs[1:]))


def assert_same_batches(left: list[PackedBatch], right: list[PackedBatch]) -> None:
    for one, other in zip(left, right, strict=True):
        for name in (f.name for f in fields(PackedBatch)):
            a, b = getattr(one, name), getattr(other, name)
            assert (a is None) == (b is None), name
            assert a is None or torch.equal(a, b), name


@pytest.fixture(scope="module")
def trained() -> dict:
    """State of a trainer whose weights are no longer the initial ones."""
    engine = MegatronEngine(config())
    engine.set_learning_rate(5e-3)
    batch = random_batch([9, 17, 5], fresh_generator())
    engine.train_step([batch], nll, trained_tokens([batch]))
    return engine.state_dict()


def test_batches_are_those_of_a_whole_pass_and_only_the_first_audit_takes_all(trained):
    whole = session_of(config(), trained)
    skipping = session_of(config(old_log_probs="rollout", old_log_probs_audit=0.1), trained)
    samples = samples_of(whole, groups=6)
    for step, audited in enumerate((24, 3, 3)):
        timer = PhaseTimer()
        left, right = score(whole, samples, PhaseTimer()), score(skipping, samples, timer)
        assert_same_batches(left.batches, right.batches)
        assert right.audit_passed
        metrics = right.metrics
        assert (metrics["old_log_probs/audited_sequences"], metrics["old_log_probs/audit_failures"]) == (audited, 0)
        assert metrics["old_log_probs/recomputed"] == 0.0
        assert ("old_log_probs/seconds_saved" in metrics) == (step > 0)
        assert "audit" in timer.seconds()
        assert not any(name.startswith("old_log_probs/") for name in left.metrics)


def test_one_bit_of_one_audited_sequence_has_everything_computed(trained):
    """Every sequence in turn: as many are found as are audited, and then the trainer's log-probs are in the batches."""
    whole = session_of(config(), trained)
    skipping = session_of(config(old_log_probs="rollout", old_log_probs_audit=0.3), trained)
    samples = samples_of(whole, groups=3)
    score(skipping, samples, PhaseTimer())
    rate, found = skipping.whole_pass_rate, 0
    for i in range(len(samples)):
        broken = [*samples[:i], one_bit_off(samples[i]), *samples[i + 1 :]]
        skipping.whole_pass_rate = rate
        scored = score(skipping, broken, PhaseTimer())
        assert scored.metrics["old_log_probs/audited_sequences"] == 4
        if scored.audit_passed:
            continue
        found += 1
        assert scored.metrics["old_log_probs/audit_failures"] == scored.metrics["old_log_probs/recomputed"] == 1.0
        assert scored.metrics["old_log_probs/seconds_saved"] < 0
        assert_same_batches(scored.batches, score(whole, broken, PhaseTimer()).batches)
        again = score(skipping, samples, PhaseTimer())
        assert (again.metrics["old_log_probs/audited_sequences"], again.audit_passed) == (12, True)
    assert found == 4


def test_a_difference_in_the_first_audit_is_found_wherever_it_is(trained):
    whole, skipping = session_of(config(), trained), session_of(config(old_log_probs="rollout"), trained)
    samples = samples_of(whole, groups=2)
    where = random.randrange(len(samples))
    samples[where] = one_bit_off(samples[where])
    scored = score(skipping, samples, PhaseTimer())
    assert scored.metrics["old_log_probs/audit_failures"] == 1.0
    assert_same_batches(scored.batches, score(whole, samples, PhaseTimer()).batches)
    assert skipping.whole_pass_rate is None


@pytest.mark.parametrize("preset", ["decoupled_token_is", "decoupled_seq_is_rs", "bypass_pg_is", "bypass_ppo_clip_geo_rs"])
@pytest.mark.parametrize("corrupt", [False, True])
def test_updates_end_with_the_same_masters(trained, preset, corrupt):
    """Two RL steps of two mini-batches, the second step's audit a sample. A corrupted sequence is found, as the share is 1."""
    sessions = [
        session_of(with_correction(config(minibatches_per_step=2, **more), preset), trained)
        for more in ({}, {"old_log_probs": "rollout", "old_log_probs_audit": 1.0 if corrupt else 0.05})
    ]
    records = []
    for step in range(2):
        samples = samples_of(sessions[0], groups=4)
        if corrupt and step == 1:
            samples[3] = one_bit_off(samples[3])
        records = [_train_on(session, step, samples, PhaseTimer(), census=False) for session in sessions]
    assert records[1]["old_log_probs/recomputed"] == float(corrupt)
    masters = [dict(session.trainer.named_masters()) for session in sessions]
    for name, master in masters[0].items():
        assert torch.equal(master, masters[1][name]), name
    for name in ("loss", "grad_norm", "tokens/trained"):
        assert records[0][name] == records[1][name], name


def test_the_audit_costs_a_fraction_of_the_whole_pass(trained):
    """Processor seconds of the phases, so that other processes do not count."""
    session = session_of(config(old_log_probs="rollout"), trained)
    samples = samples_of(session, groups=40)
    seconds = []
    for _ in range(3):
        timer = PhaseTimer(clock=time.process_time)
        metrics = score(session, samples, timer).metrics
        seconds.append(timer.seconds()["audit"])
    print(f"whole {seconds[0]:.3f} s, audits {seconds[1:]}, saved {metrics['old_log_probs/seconds_saved']:.3f} s")
    assert min(seconds[1:]) < seconds[0] / 4
    assert 0 < metrics["old_log_probs/seconds_saved"] < seconds[0]


@pytest.mark.parametrize("shares", [1, 2, 3])
def test_each_rank_audits_its_own_sequences(shares):
    generator = fresh_generator()
    batches = [random_batch([random.randint(2, 9) for _ in range(random.randint(2, 5))], generator) for _ in range(7)]
    batches = [replace(b, rollout_log_probs=torch.rand(len(b.loss_mask)) * b.loss_mask) for b in batches]
    picks = sampled(batches, 0.3, shares=shares, seed="s")
    counts = [sum(len(b.cu_seqlens) - 1 for b in batches[rank::shares]) for rank in range(shares)]
    assert [len(p) for p in picks] == [math.ceil(0.3 * count) for count in counts]
    again = sampled(batches, 0.3, shares=shares, seed="s")
    assert [[(id(b), i) for b, i in own] for own in picks] == [[(id(b), i) for b, i in own] for own in again]
    sample = packed(picks, 20, torch.device("cpu"))
    for rank in range(shares):
        wanted = [b.token_ids[b.cu_seqlens[i] : b.cu_seqlens[i + 1]].tolist() for b, i in picks[rank]]
        found = [
            part.tolist() for b in sample[rank::shares] if b.loss_mask.any() for part in b.token_ids.tensor_split(b.cu_seqlens[1:-1].long())
        ]
        assert found == wanted
        assert all(any(b is batch for batch in batches[rank::shares]) for b, _ in picks[rank])
    assert max(b.token_ids.numel() for b in sample) <= 20
    assert sum(differing(b, b.rollout_log_probs) for b in sample) == 0
    assert sum(differing(b, b.rollout_log_probs + 1) for b in sample) == sum(len(p) for p in picks)


def test_sequences_without_trained_tokens_are_not_audited():
    batch = random_batch([4, 5, 6], fresh_generator())
    batch.loss_mask[4:9] = 0
    (picks,) = sampled([batch], 1.0, shares=1, seed="s")
    assert [i for _, i in picks] == [0, 2]
    batch.loss_mask[:] = 0
    assert sampled([batch], 1.0, shares=2, seed="s") == [[], []]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"numerics": {"alignment": "fast"}}, "numerics.alignment is fast"),
        ({"numerics": {"alignment": "bitwise", "alignment_overrides": {"rotary": "native"}}}, "alignment_overrides.rotary is native"),
        ({"correction": {"preset": "bypass_ppo_clip"}}, "bypass_mode is true without weights or rejections"),
        ({"training": {"old_log_probs_audit": 0.5}}, "training.old_log_probs_audit is 0.5, but training.old_log_probs is recompute"),
    ],
)
def test_mistakes_are_one_sentence_with_a_remedy(changes, words):
    values = {"numerics": {"alignment": "bitwise"}, "training": {"old_log_probs": "rollout"}} | changes
    with pytest.raises(ConfigError, match=words) as caught:
        Config.model_validate(values)
    assert "training.old_log_probs" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_override_that_is_bitwise_own_choice_is_allowed():
    numerics = {"alignment": "bitwise", "alignment_overrides": {"rotary": "shared"}}
    assert Config.model_validate({"numerics": numerics, "training": {"old_log_probs": "rollout"}}).training.old_log_probs == "rollout"
