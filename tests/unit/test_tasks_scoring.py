"""Several rewards, parallel workers, time-outs, and the judge's client against a real server."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from answering import answering

from e2e_fp8.config.root import Config
from e2e_fp8.config.task import JudgeConfig, TaskConfig
from e2e_fp8.errors import ConfigError, DataError
from e2e_fp8.observability.names import METRICS
from e2e_fp8.tasks.dataset import load_task
from e2e_fp8.tasks.judge import JudgeError, judge_reward
from e2e_fp8.tasks.scoring import Scorer, part_names
from e2e_fp8.types import Prompt

LENGTH, MOODY, TORCH = (f"reward_cases:{name}" for name in ("length", "moody", "without_torch"))


def _prompt(uid: str = "p-1", **metadata) -> Prompt:
    return Prompt(uid=uid, text="1 + 1 =", token_ids=(3,), answer="2", metadata=metadata)


@contextmanager
def _scorer(**fields) -> Iterator[Scorer]:
    scorer = Scorer(TaskConfig(kind="file", path="x.jsonl", **fields))
    try:
        yield scorer
    finally:
        scorer.close()


def test_weights_combine_and_parts_are_kept() -> None:
    with _scorer(reward_weights={"verifier": 1.0, "math": 0.5, LENGTH: -0.25}) as scorer:
        scores = scorer.score_all([(_prompt(), "2"), (_prompt(), "4/2"), (_prompt(), "3")])
    assert scores.parts == {"verifier": [1.0, 0.0, 0.0], "math": [1.0, 1.0, 0.0], "user_1": [0.1, 0.3, 0.1]}
    assert scores.rewards == [1.5 - 0.025, 0.5 - 0.075, -0.025]
    assert scores.timeouts == 0


def test_every_part_has_a_metric() -> None:
    names = part_names(["verifier", "a:b", "math", "code", "judge", *(f"m:f{i}" for i in range(7))])
    assert names[:3] == ["verifier", "user_1", "math"]
    assert {f"reward/part/{name}" for name in names} <= METRICS.keys()


def test_workers_give_the_values_of_one_process_in_order() -> None:
    responses = [(_prompt(f"p-{i}"), "slow" if i % 3 == 0 else "x" * i) for i in range(12)]
    weights = {MOODY: 1.0, LENGTH: 2.0, "math": 0.5}
    with _scorer(reward_weights=weights) as alone, _scorer(reward_weights=weights, reward_workers=2) as pool:
        expected = alone.score_all(responses)
        assert pool.score_all(responses) == expected
        assert pool.score_all(responses[::-1]).rewards == expected.rewards[::-1]


@pytest.mark.parametrize(("workers", "rewards"), [(2, [1.0, 1.0]), (1, [0.0, 1.0])])
def test_workers_compute_side_by_side(workers: int, rewards: list[float], tmp_path: Path) -> None:
    """The first reward waits for the second to begin, which a single worker never lets it see."""
    prompt = _prompt(folder=str(tmp_path), seconds=30.0 if workers > 1 else 0.5)
    with _scorer(reward="reward_cases:meeting", reward_workers=workers) as scorer:
        assert scorer.score_all([(prompt, "first"), (prompt, "second")]).rewards == rewards


def test_reasoning_gym_entries_survive_the_way_to_a_worker() -> None:
    fields = {"mixture": {"spell_backward": 1.0, "countdown": 1.0}, "train_size": 4, "held_out_size": 2}
    sections = {"rollout": {"max_model_len": 2000}, "model": {"max_position_embeddings": 2048}}
    task = load_task(Config.model_validate({"task": fields, **sections}))
    responses = [(p, text) for p in task.train for text in (p.answer, "", "no")]
    alone = task.score_all(responses)
    assert {0.0, 1.0} <= set(alone.rewards)
    with_workers = Scorer(TaskConfig.model_validate(fields | {"reward_workers": 1}))
    assert with_workers.score_all(responses) == alone
    with_workers.close()


def test_workers_are_kept_and_do_not_import_torch() -> None:
    with _scorer(reward=MOODY, reward_workers=1) as scorer:
        first, second = (scorer.score_all([(_prompt(), "pid")]).rewards for _ in range(2))
        assert first == second != [float(os.getpid())]
    with _scorer(reward=TORCH, reward_workers=1) as scorer:
        assert scorer.score_all([(_prompt(), "")]).rewards == [0.0]


def test_a_hung_reward_is_killed_with_its_children_and_counted() -> None:
    mark = f"hung-{os.getpid()}-{time.monotonic_ns()}"
    responses = [(_prompt(f"p-{i}", mark=mark), text) for i, text in enumerate(["a", "hang", "b", "print", "c"])]
    with _scorer(reward=MOODY, reward_workers=2, reward_timeout_s=1.0, on_reward_timeout="zero") as scorer:
        scores = scorer.score_all(responses)
        assert scores.rewards == [1.0, 0.0, 1.0, 1.0, 1.0]
        assert scores.timeouts == 1
        assert scores.parts == {"user_1": [1.0] * 4}
        assert mark not in _processes()
        assert scorer.score_all(responses[:1]).rewards == [1.0]
    with _scorer(reward=MOODY, reward_workers=1, reward_timeout_s=1.0) as scorer:
        with pytest.raises(DataError, match=r"reward of prompt p-1 took longer than task\.reward_timeout_s 1 .*on_reward_timeout"):
            scorer.score_all(responses[:2])
    assert mark not in _processes()


def _processes() -> str:
    return subprocess.run(["ps", "axww", "-o", "args"], capture_output=True, text=True, check=True).stdout


def test_a_reward_that_raises_or_ends_its_process_names_the_prompt() -> None:
    with _scorer(reward=MOODY, reward_workers=1) as scorer:
        with pytest.raises(DataError, match=r"reward of prompt p-7 raised KeyError: 'rubric'"):
            scorer.score_all([(_prompt("p-7"), "raise")])
        with pytest.raises(DataError, match=r"reward of prompt p-8 ended its worker process with exit code 3"):
            scorer.score_all([(_prompt("p-8"), "die")])
        assert scorer.score_all([(_prompt(), "fine")]).rewards == [1.0]


def test_no_worker_outlives_its_parent() -> None:
    code = f"""
import os, signal, sys
from e2e_fp8.config.task import TaskConfig
from e2e_fp8.tasks.scoring import Scorer
from e2e_fp8.types import Prompt
scorer = Scorer(TaskConfig(kind="file", path="x.jsonl", reward={MOODY!r}, reward_workers=1))
print(int(scorer.score_all([(Prompt(uid="p", text="t", token_ids=(1,), answer=""), "pid")]).rewards[0]), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    worker = int(result.stdout)
    deadline = time.monotonic() + 5
    while Path(f"/proc/{worker}/cmdline").exists() and Path(f"/proc/{worker}/cmdline").read_bytes() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not (Path(f"/proc/{worker}/cmdline").exists() and Path(f"/proc/{worker}/cmdline").read_bytes())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"reward": "maths"}, r"task\.reward is 'maths'"),
        ({"reward_weights": {"math": 1.0, "x": 1.0}}, r"task\.reward_weights has 'x'"),
        ({"reward_weights": {f"m:f{i}": 1.0 for i in range(9)}}, "more than 8 import paths"),
        ({"reward": "judge"}, r"task\.judge\.url"),
        ({"reward_weights": {"math": float("inf")}}, "finite"),
    ],
)
def test_contradictory_rewards_are_refused(fields: dict, message: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=message):
        Config.model_validate({"task": fields})


@contextmanager
def _judge(*modes: str) -> Iterator[tuple[str, Path]]:
    with answering(*modes) as (url, log):
        yield f"{url}/v1", log


def _cfg(url: str, **fields) -> JudgeConfig:
    return JudgeConfig(url=url, model="judge-1", **{"retries": 2, "timeout_s": 5.0, **fields})


def test_judge_sends_a_chat_completion_and_reads_the_last_score(monkeypatch) -> None:
    monkeypatch.setenv("E2E_FP8_JUDGE_KEY", "k-123")
    with _judge("text:Score: 3? No.\nScore: 7.5", "text:**Score:** 12", "text:I would say 5", "text:Score: -1") as (url, log):
        rewards = [judge_reward(_prompt(), "see {answer} {x}", _cfg(url + "/")) for _ in range(4)]
        requests = [json.loads(line) for line in log.read_text().splitlines()]
    assert rewards == [0.75, 1.0, 0.5, 0.0]
    assert requests[0]["path"] == "/v1/chat/completions"
    assert requests[0]["authorization"] == "Bearer k-123"
    body = requests[0]["body"]
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("judge-1", 0, 256)
    assert "1 + 1 =" in body["messages"][0]["content"]
    assert "see {answer} {x}" in body["messages"][0]["content"]


def test_judge_retries_what_may_pass_and_nothing_else() -> None:
    with _judge("status:503", "status:429", "text:Score: 10") as (url, log):
        assert judge_reward(_prompt(), "r", _cfg(url)) == 1.0
        assert len(log.read_text().splitlines()) == 3
    with _judge("drop", "text:Score: 10") as (url, log):
        assert judge_reward(_prompt(), "r", _cfg(url)) == 1.0
    for mode, cause in (("status:401", "status 401"), ("junk", "not a chat completion"), ("null", "content is NoneType")):
        with _judge(mode, "text:Score: 10") as (url, log):
            with pytest.raises(JudgeError, match=rf"prompt p-1 after 1 requests, last: .*{cause}"):
                judge_reward(_prompt(), "r", _cfg(url))
            assert len(log.read_text().splitlines()) == 1


def test_judge_failures_are_one_sentence() -> None:
    with _judge("hang", "hang") as (url, _):
        started = time.monotonic()
        with pytest.raises(JudgeError, match=r"after 2 requests, last: .*(no answer within 0.3 s|timed out)"):
            judge_reward(_prompt(), "r", _cfg(url, retries=1, timeout_s=0.3))
        assert time.monotonic() - started < 4
    with pytest.raises(JudgeError, match="Connection refused"):
        judge_reward(_prompt(), "r", _cfg(url, retries=0))
    with _judge("text:excellent work") as (url, _):
        with pytest.raises(JudgeError, match=r"no score for prompt p-1 .*task\.judge\.template"):
            judge_reward(_prompt(), "r", _cfg(url))


def test_judge_runs_in_workers_and_its_errors_arrive_whole() -> None:
    with _judge("text:Score: 5", "text:Score: 5", "status:400") as (url, _):
        with _scorer(reward="judge", reward_workers=2, judge={"url": url, "model": "m"}) as scorer:
            assert scorer.score_all([(_prompt(), "a"), (_prompt(), "b")]).rewards == [0.5, 0.5]
            with pytest.raises(DataError, match=r"the judge at .* did not score prompt p-1 after 1 requests, last: status 400"):
                scorer.score_all([(_prompt(), "c")])
