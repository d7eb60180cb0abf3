"""Rewards of served reward models: the client against a real HTTP server, and against vLLM's own pooling server."""

import json
import math
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from answering import answering

from e2e_fp8.config.root import Config
from e2e_fp8.config.task import RewardModelConfig, TaskConfig
from e2e_fp8.errors import ConfigError, DataError
from e2e_fp8.tasks.reward_model import RewardModelError, reward_model_reward, reward_model_rewards
from e2e_fp8.tasks.scoring import Scorer
from e2e_fp8.types import Prompt

RIGHT = 'json:{"data": [{"probs": [0.25]}]}'


def prompt(uid: str = "p-1") -> Prompt:
    return Prompt(uid=uid, text="1 + 1 =", token_ids=(3,), answer="2", metadata={})


def settings(url: str, **fields) -> RewardModelConfig:
    return RewardModelConfig(url=url, model="rm", **{"retries": 2, "timeout_s": 5.0, **fields})


@pytest.mark.parametrize(
    ("fields", "answer", "reward", "body"),
    [
        ({}, {"probs": [0.25, 0.75]}, 0.75, {"model": "rm", "input": "1 + 1 =yes {answer}"}),
        ({"class_index": 0, "factor": 2.0}, {"probs": [0.25, 0.75]}, 0.5, {"model": "rm", "input": "1 + 1 =yes {answer}"}),
        ({"template": "{response}|{answer}"}, {"probs": [3]}, 3.0, {"model": "rm", "input": "yes {answer}|2"}),
        (
            {"activation": False, "smallest": -2.0},
            {"probs": [-7.5]},
            -2.0,
            {"model": "rm", "use_activation": False, "input": "1 + 1 =yes {answer}"},
        ),
        ({"endpoint": "score"}, {"score": 0.5}, 0.5, {"model": "rm", "queries": "1 + 1 =", "documents": "yes {answer}"}),
        ({"endpoint": "pooling"}, {"data": [1.5]}, 1.5, {"model": "rm", "input": "1 + 1 =yes {answer}"}),
        ({"endpoint": "pooling", "largest": 4.0}, {"data": [[9.0], [1.0], [8.0]]}, 4.0, {"model": "rm", "input": "1 + 1 =yes {answer}"}),
    ],
)
def test_each_endpoint_is_asked_and_read(monkeypatch, fields, answer, reward, body):
    monkeypatch.setenv("E2E_FP8_REWARD_MODEL_KEY", "k-9")
    with answering("json:" + json.dumps({"data": [answer]})) as (url, log):
        assert reward_model_reward(prompt(), "yes {answer}", settings(url + "/", **fields)) == reward
        (request,) = [json.loads(line) for line in log.read_text().splitlines()]
    assert request == {"path": f"/{fields.get('endpoint', 'classify')}", "authorization": "Bearer k-9", "body": body}


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "null", "true", '"0.5"', "[]"])
@pytest.mark.parametrize("endpoint", ["classify", "score", "pooling"])
def test_no_number_is_refused_and_the_prompt_named(endpoint, value):
    entry = {"classify": f'{{"probs": [{value}]}}', "score": f'{{"score": {value}}}', "pooling": f'{{"data": [{value}]}}'}[endpoint]
    with answering(f'json:{{"data": [{entry}]}}') as (url, log):
        with pytest.raises(
            RewardModelError, match=rf"{endpoint} .*did not score prompt p-1 after 1 requests, last: the answer is not that"
        ):
            reward_model_reward(prompt(), "r", settings(url, endpoint=endpoint))
        assert len(log.read_text().splitlines()) == 1


def test_what_may_pass_is_tried_again_and_nothing_else():
    with answering("status:503", "status:429", RIGHT) as (url, log):
        assert reward_model_reward(prompt(), "r", settings(url)) == 0.25
        assert len(log.read_text().splitlines()) == 3
    with answering("hang", RIGHT) as (url, _):
        assert reward_model_reward(prompt(), "r", settings(url, timeout_s=0.5)) == 0.25
    for mode, cause in (
        ("status:404", "status 404"),
        ("junk", "JSONDecodeError"),
        ('json:{"data": []}', "IndexError"),
        ("json:7", "TypeError"),
    ):
        with answering(mode, RIGHT) as (url, log):
            with pytest.raises(
                RewardModelError, match=rf"p-1 after 1 requests, last: .*{cause}.*task.reward_model.timeout_s or retries\.$"
            ):
                reward_model_reward(prompt(), "r", settings(url))
            assert len(log.read_text().splitlines()) == 1
    with pytest.raises(RewardModelError, match=r"after 1 requests, last: .*Connection refused"):
        reward_model_reward(prompt(), "r", settings(url, retries=0))


def test_requests_go_side_by_side_and_answers_come_in_order():
    """Twelve answers of half a second: one after the other they would take six."""
    with answering('late:{"data": [{"score": 1.0}]}') as (url, log):
        cfg = settings(url, endpoint="score", parallel=12, timeout_s=60.0)
        started = time.monotonic()
        assert reward_model_rewards([(prompt(f"p-{i}"), str(i)) for i in range(12)], cfg) == [1.0] * 12
        assert time.monotonic() - started < 6
        assert sorted(int(json.loads(line)["body"]["documents"]) for line in log.read_text().splitlines()) == list(range(12))
    with answering("status:400") as (url, _):
        with pytest.raises(RewardModelError, match=r"prompt p-0 "):
            reward_model_rewards([(prompt(f"p-{i}"), "r") for i in range(4)], settings(url, parallel=2))


@pytest.mark.parametrize("workers", [0, 2])
def test_it_combines_with_other_rewards(workers):
    with answering(RIGHT) as (url, _):
        fields = {"reward_weights": {"verifier": 1.0, "reward_model": -2.0}, "reward_workers": workers}
        scorer = Scorer(TaskConfig(kind="file", path="x.jsonl", reward_model=settings(url), **fields))
        try:
            scores = scorer.score_all([(prompt(), "2"), (prompt("p-2"), "3")])
        finally:
            scorer.close()
    assert scores.rewards == [0.5, -0.5]
    assert scores.parts == {"verifier": [1.0, 0.0], "reward_model": [0.25, 0.25]}


def test_an_error_of_a_worker_arrives_whole():
    with answering("status:400") as (url, _):
        scorer = Scorer(TaskConfig(kind="file", path="x.jsonl", reward="reward_model", reward_workers=1, reward_model=settings(url)))
        try:
            with pytest.raises(DataError, match=r"the reward model at .*/classify .* did not score prompt p-1 after 1 requests"):
                scorer.score_all([(prompt(), "2")])
        finally:
            scorer.close()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({}, r"task\.reward_model\.url and model"),
        ({"url": "http://h", "model": "m", "smallest": 10.0}, r"task\.reward_model\.smallest is 10"),
    ],
)
def test_contradictions_are_refused_when_the_file_is_read(model, message):
    with pytest.raises(ConfigError, match=message):
        Config.model_validate({"task": {"reward": "reward_model", "reward_model": model}})


WORDS = ["[PAD]", "[UNK]", *"0123456789", "+", "=", "yes", "no"]


def write_classifier(folder: Path):
    """A tiny Qwen3 sequence classifier with random weights and its tokenizer; returns the model, on the CPU in float32."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForSequenceClassification

    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]", eos_token="[PAD]")
    wrapped.save_pretrained(folder)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen3Config(
        vocab_size=len(WORDS), head_dim=32, max_position_embeddings=128, num_labels=1, pad_token_id=0, initializer_range=0.2, **shape
    )
    torch.manual_seed(time.monotonic_ns() % 2**31)
    model = Qwen3ForSequenceClassification(config).float().eval()
    model.save_pretrained(folder)
    return model, wrapped


@pytest.mark.slow
@pytest.mark.server
def test_vllm_serves_a_classifier_whose_numbers_are_its_own(tmp_path):
    """One server; each endpoint's number is that of the same weights in transformers."""
    import torch

    model, tokenizer = write_classifier(tmp_path / "model")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = ["--runner", "pooling", "--dtype", "float32", "--enforce-eager", "--max-model-len", "64", "--port", str(port)]
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(tmp_path / "model"),
        "--served-model-name",
        "rm",
        *flags,
    ]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "TORCH_COMPILE_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        await_health(f"http://127.0.0.1:{port}/health", server, tmp_path / "log")
        responses = [(prompt(f"p-{i}"), text) for i, text in enumerate(["2", "yes", "no 7 3", "1 1"])]
        rewards = {}
        for endpoint in ("classify", "pooling", "score"):
            cfg = settings(f"http://127.0.0.1:{port}", endpoint=endpoint, activation=False, timeout_s=120.0)
            rewards[endpoint] = reward_model_rewards(responses, cfg)
        with torch.no_grad():
            expected = [float(model(**tokenizer(p.text + text, return_tensors="pt")).logits[0, 0]) for p, text in responses]
        # float32 on both sides, another order of sums in sixteen products of at most 128 terms
        assert rewards["classify"] == pytest.approx(expected, abs=1e-3)
        assert rewards["pooling"] == rewards["classify"] == rewards["score"]
        assert len({round(value, 2) for value in expected}) > 1
        # by default the server applies the sigmoid of a single label
        scores = reward_model_rewards(responses, settings(f"http://127.0.0.1:{port}", endpoint="score", timeout_s=120.0))
        assert scores == pytest.approx([1 / (1 + math.exp(-value)) for value in expected], abs=1e-3)
        with pytest.raises(RewardModelError, match=r"prompt p-1 after 1 requests, last: status 404"):
            reward_model_reward(prompt(), "2", settings(f"http://127.0.0.1:{port}").model_copy(update={"model": "other"}))
    finally:
        os.killpg(server.pid, 15)
        server.wait(timeout=60)


def await_health(url: str, server: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + 500
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text()[-3000:]
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(log.read_text()[-3000:])
