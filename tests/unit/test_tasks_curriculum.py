"""Mixtures and levels: shares, moves by the success rate, and a state that continues as if it had never stopped."""

import json
import math
import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from e2e_fp8.config.root import Config
from e2e_fp8.config.task import CurriculumConfig
from e2e_fp8.errors import ConfigError, DataError
from e2e_fp8.orchestration.checkpoint import CheckpointStore
from e2e_fp8.tasks.curriculum import Curriculum, Level, moved
from e2e_fp8.tasks.dataset import load_task
from e2e_fp8.types import Prompt

WORDS = [{"min_word_len": n, "max_word_len": n} for n in (3, 4, 5)]
TASK = {
    "mixture": {"spell_backward": 3.0, "chain_sum": 1.0},
    "mixture_params": {"chain_sum": {"min_terms": 2, "max_terms": 2}},
    "curriculum": {"levels": {"spell_backward": WORDS}, "window": 2},
    "train_size": 30,
    "held_out_size": 10,
}


def _prompt(name: str, level: int, i: int) -> Prompt:
    return Prompt(uid=f"{name}{level}-{i}", text=f"{name}{level}-{i}", token_ids=(1,), answer="", metadata={"source": name, "level": level})


def _curriculum(cfg: CurriculumConfig | None = None) -> Curriculum:
    pools = {name: [[_prompt(name, level, i) for i in range(9)] for level in range(top + 1)] for name, top in (("a", 2), ("b", 1))}
    return Curriculum(pools=pools, weights={"a": 3.0, "b": 1.0}, cfg=cfg or CurriculumConfig(window=2))


def _level_by_replay(rates: list[float], top: int, cfg: CurriculumConfig) -> int:
    """The rule told anew: start at 0; whenever the last ``window`` rates since the last move agree, move and forget them."""
    level, since = 0, 0
    for end in range(1, len(rates) + 1):
        if end - since < cfg.window:
            continue
        rate = math.fsum(rates[end - cfg.window : end]) / cfg.window
        step = (rate > cfg.raise_above and level < top) - (rate < cfg.lower_below and level > 0)
        if step:
            level, since = level + step, end
    return level


@given(st.lists(st.floats(0, 1), max_size=60), st.integers(0, 4), st.integers(1, 6))
def test_level_is_a_function_of_the_success_rates(rates: list[float], top: int, window: int) -> None:
    cfg, state = CurriculumConfig(window=window), Level()
    for rate in rates:
        state = moved(state, rate, top, cfg)
        assert 0 <= state.level <= top
        assert len(state.recent) < window
    assert state.level == _level_by_replay(rates, top, cfg)


def test_level_climbs_with_success_and_falls_with_failure() -> None:
    cfg, state, seen = CurriculumConfig(window=2), Level(), []
    for rate in [1.0] * 7 + [0.0] * 3 + [0.5] * 4:
        state = moved(state, rate, 2, cfg)
        seen.append(state.level)
    assert seen == [0, 1, 1, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1]


def test_shares_follow_the_weights_and_a_step_repeats_nothing_it_need_not() -> None:
    curriculum, counts = _curriculum(), Counter()
    for step in range(300):
        prompts = curriculum.prompts_of_step(step, 8, seed=5)
        assert len({p.uid for p in prompts}) == 8
        counts.update(p.metadata["source"] for p in prompts)
        assert {p.metadata["level"] for p in prompts} == {0}
    assert counts["a"] / counts.total() == pytest.approx(0.75, abs=0.03)
    assert len({tuple(p.uid for p in curriculum.prompts_of_step(step, 8, seed=5)) for step in range(50)}) == 50
    assert len(curriculum.prompts_of_step(0, 100, seed=5)) == 100


def _run(curriculum: Curriculum, steps: range) -> list[tuple[list[str], dict[str, float]]]:
    """Steps whose responses pass or fail at random, a function of the step alone."""
    log = []
    for step in steps:
        prompts = [p for p in curriculum.prompts_of_step(step, 6, seed=3) for _ in range(4)]
        chance = random.Random(step)
        record = curriculum.observe(prompts, [chance.random() < 0.9 - 0.3 * p.metadata["level"] for p in prompts])
        log.append(([p.uid for p in prompts], record))
    return log


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 40))
def test_a_resumed_curriculum_continues_bit_for_bit(tmp_path_factory, cut: int) -> None:
    whole = _curriculum()
    log = _run(whole, range(40))
    assert {state.level for state in whole.levels.values()} != {0}
    first = _curriculum()
    assert _run(first, range(cut)) == log[:cut]
    store = CheckpointStore(tmp_path_factory.mktemp("c"), keep=1)
    store.save(cut, {"curriculum": first.state_dict()})
    resumed = _curriculum()
    resumed.load_state_dict(store.load_latest()["curriculum"])
    assert _run(resumed, range(cut, 40)) == log[cut:]
    assert resumed.levels == whole.levels
    assert json.loads(json.dumps(resumed.state_dict())) == whole.state_dict()


def test_a_data_set_that_a_step_did_not_draw_keeps_its_state() -> None:
    curriculum = _curriculum()
    only_a = [p for p in curriculum.prompts_of_step(0, 20, seed=1) if p.metadata["source"] == "a"]
    record = curriculum.observe(only_a, [True] * len(only_a))
    assert record == {"curriculum/level_mean": 0.0, "curriculum/success_rate": 1.0}
    assert curriculum.levels == {"a": Level(recent=(1.0,)), "b": Level()}


def test_mixture_is_built_from_the_config() -> None:
    task = load_task(Config.model_validate({"task": TASK}))
    assert task.curriculum is not None
    assert {name: len(pools) for name, pools in task.curriculum.pools.items()} == {"spell_backward": 3, "chain_sum": 1}
    pools = [pool for pools in task.curriculum.pools.values() for pool in pools]
    assert [len(pool) for pool in pools] == [30] * 4
    assert [p.uid for pool in pools for p in pool] == [p.uid for p in task.train]
    assert [len(p.answer) for p in pools[2]] == [5] * 30
    assert Counter((p.metadata["source"], p.metadata["level"]) for p in task.held_out) == {
        ("spell_backward", 0): 3, ("spell_backward", 1): 3, ("spell_backward", 2): 2, ("chain_sum", 0): 2,
    }  # fmt: skip
    texts = [p.text for p in (*task.train, *task.held_out)]
    assert len(set(texts)) == len(texts)
    assert len({p.uid for p in (*task.train, *task.held_out)}) == len(texts)
    assert all(task.score(p, p.answer) == 1.0 for p in (*task.train, *task.held_out))
    again = load_task(Config.model_validate({"task": TASK}))
    assert [replace(p, metadata={}) for p in again.train] == [replace(p, metadata={}) for p in task.train]


def test_one_data_set_without_levels_needs_no_curriculum() -> None:
    assert load_task(Config.model_validate({"task": {"train_size": 8, "held_out_size": 4}})).curriculum is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mixture": {"spell_backward": 0.0}}, "shares must be positive"),
        ({"params": {"min_terms": 2}}, r"task\.mixture_params"),
        ({"curriculum": {"levels": {"countdown": [{}]}}}, "names countdown"),
        ({"mixture_params": {"countdown": {}}}, "names countdown"),
        ({"curriculum": {"levels": {"chain_sum": []}}}, "empty list"),
        ({"curriculum": {"lower_below": 0.8}}, "first must be below"),
        ({"kind": "file", "path": "x.jsonl"}, r"task\.kind is file"),
    ],
)
def test_contradictory_mixtures_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config.model_validate({"task": {**TASK, **changes}})


def test_levels_that_share_their_prompts_are_refused() -> None:
    same = {**TASK, "mixture": {"spell_backward": 1.0}, "mixture_params": {}}
    with pytest.raises(DataError, match=r"spell_backward at level 1 has \d+ prompts that no earlier pool has"):
        load_task(Config.model_validate({"task": {**same, "curriculum": {"levels": {"spell_backward": [WORDS[0]] * 2}}}}))
