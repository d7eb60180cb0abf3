"""A GPU run, its block-FP8 export, and stock vLLM serving it, offline and over HTTP: same bytes, same greedy answers."""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
from stock_vllm_process import MAX_TOKENS, STOCK_ARGS, STOCK_ENVIRONMENT

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1200)]
ROOT = Path(__file__).resolve().parents[2]


def run(*words: object) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, timeout=500, cwd=ROOT)
    assert done.returncode == 0, (done.stdout[-1000:], done.stderr[-4000:])
    return done


@pytest.fixture(scope="module", params=["quickstart_dense", "quickstart"])
def offline(request, tmp_path_factory) -> dict[str, Any]:
    """A trained and exported policy, its prompts and its samples, and what stock vLLM makes of it in process."""
    folder = tmp_path_factory.mktemp("stock")
    sets = {"run.out_dir": folder, "run.name": "r", "run.steps": 3, "run.checkpoint_interval": 3, "run.eval_interval": 3}
    sets |= {"rollout.kv_cache_gib": 4, "run.backend": "cuda"}
    words = [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
    run("-m", "e2e_fp8.cli.main", "train", f"configs/{request.param}.yaml", *words)
    run("-m", "e2e_fp8.cli.main", "export", folder / "r", "--out", folder / "hf")
    samples = [json.loads(line) for line in (folder / "r" / "samples.jsonl").read_text().splitlines()]
    from e2e_fp8.tasks.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(folder / "hf")
    prompts = [list(tokenizer.encode_prompt(s["prompt"])) for s in samples]
    (folder / "hf" / "prompts.json").write_text(json.dumps(prompts))
    result = json.loads(run(ROOT / "tests/gpu/stock_vllm_process.py", folder / "hf").stdout.splitlines()[-1])
    return result | {"checkpoint": folder / "hf", "prompts": prompts, "samples": samples}


def post(url: str, body: dict[str, Any], token: str | None) -> tuple[int, dict[str, Any]]:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def await_health(url: str, server: subprocess.Popen, log: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        assert server.poll() is None, log.read_text()[-4000:]
        assert time.monotonic() < deadline, log.read_text()[-4000:]
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.5)


@contextmanager
def stock_server(checkpoint: Path, token: str) -> Iterator[str]:
    """URL of vLLM's own OpenAI server of ``checkpoint``, ended with everything that it started."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ["--model", checkpoint, "--served-model-name", "policy", "--api-key", token, "--host", "127.0.0.1", "--port", port]
    for name, value in STOCK_ARGS.items():
        words += [f"--{name.replace('_', '-')}", *([] if value is True else [value])]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *map(str, words)]
    url, log = f"http://127.0.0.1:{port}", checkpoint.parent / "stock_server.log"
    with log.open("wb") as out:
        environ = os.environ | STOCK_ENVIRONMENT
        server = subprocess.Popen(command, env=environ, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True)
    try:
        await_health(url, server, log, 500)
        yield url
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def assert_letters_of_the_task(samples: list[dict[str, Any]], texts: list[str]) -> None:
    """The warm start has taught the task in part; an unread or scrambled checkpoint spells none of these words."""
    letters = [set(s["answer"]) & set(text) for s, text in zip(samples, texts, strict=True)]
    assert all(letters)


def test_stock_vllm_serves_the_exported_bytes(offline):
    assert offline["tensors"] > 10
    assert offline["different"] == []
    assert_letters_of_the_task(offline["samples"], offline["texts"])
    print(list(zip([s["prompt"][-40:] for s in offline["samples"]], offline["texts"], strict=True)))


def test_stock_server_gives_the_same_answers_over_http(offline):
    """``vllm serve`` of the exported folder, with a token and without this package: what users of a checkpoint do."""
    token, texts, ids = secrets.token_urlsafe(32), [], []
    body = {"model": "policy", "temperature": 0.0, "max_tokens": MAX_TOKENS, "return_token_ids": True}
    with stock_server(offline["checkpoint"], token) as url:
        for wrong in (None, token[:-1], token + "x"):
            status, answer = post(url, body | {"prompt": offline["prompts"][0]}, wrong)
            assert (status, "choices" in answer) == (401, False)
        for prompt in offline["prompts"]:
            status, answer = post(url, body | {"prompt": prompt}, token)
            assert status == 200, answer
            texts.append(answer["choices"][0]["text"])
            ids.append(answer["choices"][0]["token_ids"])
    assert ids == offline["ids"]
    assert texts == offline["texts"]
    assert_letters_of_the_task(offline["samples"], texts)
    print(list(zip([s["prompt"][-40:] for s in offline["samples"]], texts, strict=True)))
