"""Group-relative advantages from shaped rewards, in the step's own scoring: KL to the reference and soft overlong punishment taken off."""

import math
import random
import statistics
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from test_batching import make_sample
from training_cases import VOCAB, fresh_generator, nll, random_batch, small_config, trained_tokens

from e2e_fp8.config.root import Config
from e2e_fp8.observability.names import check_names
from e2e_fp8.observability.timers import PhaseTimer
from e2e_fp8.orchestration.scoring import score
from e2e_fp8.orchestration.session import Session
from e2e_fp8.training.engine import MegatronEngine
from e2e_fp8.types import Sample

GROUPS, SIZE, LIMIT = 3, 4, 12


def session_of(**objective) -> Session:
    """A trainer that has moved away from its reference."""
    base = small_config("qwen3").model_dump(mode="json")
    base["rollout"]["max_response_tokens"] = LIMIT
    base["objective"] = {"kind": "grpo", "kl_coef": 0.3, "kl_placement": "reward", **objective}
    cfg = Config.model_validate(base)
    session = Session(cfg=cfg, task=None, trainer=MegatronEngine(cfg), model_dir=None)  # type: ignore[arg-type]
    session.make_reference()
    batch = random_batch([9, 17, 5], fresh_generator())
    session.trainer.set_learning_rate(5e-3)
    session.trainer.train_step([batch], nll, trained_tokens([batch]))
    return session


def samples_of(rng: random.Random) -> list[Sample]:
    found = []
    for group in range(GROUPS):
        prompt = rng.choices(range(VOCAB), k=rng.randint(2, 6))
        for _ in range(SIZE):
            response = rng.choices(range(VOCAB), k=rng.randint(1, LIMIT))
            sample = make_sample(f"p{group}", prompt, response, [-1.0] * len(response))
            found.append(replace(sample, group_id=group, reward=rng.random()))
    return found


def token_kl(old: float, ref: float, estimator: str) -> float:
    d = ref - old
    return {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - d - 1}[estimator]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("buffer", [0, 5])
def test_kl_and_overlong_punishment_are_taken_off_each_response_before_its_group_is_compared(estimator, buffer):
    session = session_of(kl_estimator=estimator, overlong_buffer_tokens=buffer, overlong_penalty=0.7)
    samples = samples_of(random.Random(fresh_generator().initial_seed()))
    scored = score(session, samples, PhaseTimer())
    check_names(scored.metrics)
    rows, kls = [], []
    for batch in scored.batches:
        assert batch.ref_log_probs is not None
        for start, end in pairwise(batch.cu_seqlens.tolist()):
            trained = [t for t in range(start, end) if batch.loss_mask[t] > 0]
            kls.append([token_kl(float(batch.old_log_probs[t]), float(batch.ref_log_probs[t]), estimator) for t in trained])
            rows.append({float(batch.advantages[t]) for t in trained})
    shaped = []
    for sample, kl in zip(samples, kls, strict=True):
        over = max(len(sample.response_token_ids) - (LIMIT - buffer), 0) / buffer if buffer else 0.0
        shaped.append(sample.reward - 0.7 * over - 0.3 * math.fsum(kl))
    assert max(abs(math.fsum(kl)) for kl in kls) > 1e-3
    for first in range(0, len(samples), SIZE):
        group = shaped[first : first + SIZE]
        for reward, advantages in zip(group, rows[first : first + SIZE], strict=True):
            (advantage,) = advantages
            expected = (reward - statistics.fmean(group)) / (statistics.stdev(group) + 1e-6)
            # rewards are float32 sums of size 1; the division magnifies their error where a group's rewards lie close together
            assert advantage == pytest.approx(expected, abs=1e-5 + 1e-6 / statistics.stdev(group))
    tokens = [kl for row in kls for kl in row]
    assert scored.metrics["kl_ref"] == pytest.approx(math.fsum(tokens) / len(tokens), rel=1e-4, abs=1e-6)
    assert ("reward/overlong_penalty" in scored.metrics) == (buffer > 0)
    assert torch.tensor(shaped).isfinite().all()
