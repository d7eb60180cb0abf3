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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
from stock_vllm_process import MAX_TOKENS, STOCK_ARGS, STOCK_ENVIRONMENT

from e2e_fp8.config.load import load_config
from e2e_fp8.tasks.dataset import load_task
from e2e_fp8.types import Prompt

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]
ROOT = Path(__file__).resolve().parents[2]
PROCESS = ROOT / "tests" / "gpu" / "stock_vllm_process.py"
PROMPTS = 4
CONFIGS = [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in ("quickstart_dense", "quickstart")]


def run(*words: object) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, (done.stdout[-1000:], done.stderr[-4000:])
    return done


@pytest.fixture(scope="module", params=CONFIGS)
def served(request, tmp_path_factory) -> Iterator[dict[str, Any]]:
    """A trained and exported policy and held-out prompts, what stock vLLM makes of them in process, and its server, started meanwhile."""
    folder, config = tmp_path_factory.mktemp("stock"), f"configs/{request.param}.yaml"
    sets = {"run.out_dir": folder, "run.name": "r", "run.steps": 1, "run.checkpoint_interval": 1, "run.eval_interval": 0}
    # few sequences at once, so few DeepGEMM kernels to compile
    sets |= {"rollout.prompts_per_step": 8, "rollout.group_size": 4, "rollout.max_num_seqs": 32, "training.minibatches_per_step": 1}
    sets |= {"rollout.kv_cache_gib": 4, "run.backend": "cuda", "run.tensorboard": False}
    overrides = [f"{key}={value}" for key, value in sets.items()]
    run("-m", "e2e_fp8.cli.main", "train", config, *(word for item in overrides for word in ("--set", item)))
    run("-m", "e2e_fp8.cli.main", "export", folder / "r", "--out", folder / "hf")
    task = load_task(load_config(ROOT / config, overrides))
    prompts = task.held_out[:PROMPTS]
    task.close()
    (folder / "hf" / "prompts.json").write_text(json.dumps([list(p.token_ids) for p in prompts]))
    token = secrets.token_urlsafe(32)
    with stock_server(folder / "hf", token) as (url, await_server):
        offline = json.loads(run(PROCESS, folder / "hf").stdout.splitlines()[-1])
        yield offline | {"prompts": prompts, "url": url, "token": token, "await_server": await_server}


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
def stock_server(checkpoint: Path, token: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """vLLM's own OpenAI server of ``checkpoint``: its URL, and what waits until it answers. Ended with everything that it started."""
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
        yield url, lambda: await_health(url, server, log, 200)
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def assert_letters_of_the_task(prompts: list[Prompt], texts: list[str]) -> None:
    """The warm start has taught the task in part; an unread or scrambled checkpoint spells none of these words."""
    print(list(zip([prompt.text[-40:] for prompt in prompts], texts, strict=True)))
    assert all(set(prompt.answer) & set(text) for prompt, text in zip(prompts, texts, strict=True))


def test_stock_vllm_serves_the_exported_bytes(served):
    assert served["tensors"] > 10
    assert served["different"] == []
    assert_letters_of_the_task(served["prompts"], served["texts"])


def test_stock_server_gives_the_same_answers_over_http(served):
    """``vllm serve`` of the exported folder, with a token and without this package: what users of a checkpoint do."""
    token, url, texts, ids = served["token"], served["url"], [], []
    body = {"model": "policy", "temperature": 0.0, "max_tokens": MAX_TOKENS, "return_token_ids": True}
    served["await_server"]()
    for wrong in (None, token[:-1], token + "x"):
        status, answer = post(url, body | {"prompt": list(served["prompts"][0].token_ids)}, wrong)
        assert (status, "choices" in answer) == (401, False)
    for prompt in served["prompts"]:
        status, answer = post(url, body | {"prompt": list(prompt.token_ids)}, token)
        assert status == 200, answer
        texts.append(answer["choices"][0]["text"])
        ids.append(answer["choices"][0]["token_ids"])
    assert ids == served["ids"]
    assert texts == served["texts"]
    assert_letters_of_the_task(served["prompts"], texts)
