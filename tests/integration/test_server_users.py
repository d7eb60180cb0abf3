"""Who uses the server: the project's own loop, a foreign training script, and ranks that split the model."""

import http.server
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from integration.server_cases import Served, assert_live, case_config, generate, random_weights, start_server, write_model
from integration.tiny_runs import ROOT, records, run, train_command

from e2e_fp8.errors import EngineError
from e2e_fp8.rollout.server_process import ServerProcess
from e2e_fp8.sync.http_client import ServerClient
from e2e_fp8.sync.token import TOKEN_VARIABLE

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]


@pytest.mark.slow
def test_foreign_trainer_publishes_and_its_lesson_is_served(tmp_path):
    teach_and_serve(tmp_path, "cpu")


def teach_and_serve(tmp_path, device: str) -> None:
    cfg = case_config("qwen3", device=device, vocab_size=128)
    model = write_model(cfg, tmp_path / "model")
    server = start_server(cfg, model, tmp_path / "server")
    try:
        script = [sys.executable, ROOT / "examples/foreign_trainer.py", server.url, model, "ipc"]
        environ = {**os.environ, TOKEN_VARIABLE: server.token, "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"}
        done = subprocess.run(list(map(str, script)), capture_output=True, text=True, timeout=400, env=environ)
        assert done.returncode == 0, done.stderr[-3000:]
        versions = ServerClient(server.url, server.token, timeout_s=60).collective("weight_state")
    finally:
        server.close()
    assert [state["policy_version"] for state in versions] == [2]
    lesson, before, _, after = (json.loads(text) for text in re.findall(r"\[[\d, ]+\]", done.stdout))
    assert before != lesson
    assert after == lesson
    digests = re.findall(r"receipt of (\d+) tensors (\w+)", done.stdout)
    assert [int(count) for count, _ in digests] == [2 * 7 * cfg.model.num_hidden_layers] * 2
    assert digests[0][1] != digests[1][1]


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["qwen3_moe"])
def test_two_rollout_ranks_hold_their_parts(tmp_path, architecture):
    cfg = case_config(architecture, tensor_parallel=2, num_key_value_heads=2, num_attention_heads=4, moe_intermediate_size=256)
    served = Served(cfg, tmp_path)
    try:
        for version, transport in enumerate(("ipc", "nccl"), start=1):
            weights = random_weights(cfg, 10 + version)
            served.publish(transport, weights, version)
            assert served.versions() == [version, version]
            for rank in range(2):
                assert_live(served, weights, rank=rank, size=2)
        assert len(generate(served.client)) == 8
    finally:
        served.process.close()


@pytest.mark.slow
def test_whole_loop_with_a_server(tmp_path):
    done = run(train_command(tmp_path, "served", "rollout.placement=server", "sync.transport=ipc", "run.steps=2"))
    assert done.returncode == 0, done.stderr[-3000:]
    receipts = records(tmp_path / "served", "receipts.jsonl")
    assert [r["passed"] for r in receipts] == [True] * 3
    assert len({r["digest"] for r in receipts}) == 3
    steps = records(tmp_path / "served")
    assert all(0 <= r["mismatch_kl"] < 0.05 for r in steps if r["phase"] == 1.0)
    left = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True)
    assert left.stdout == ""


@pytest.mark.slow
def test_control_routes_without_a_token_do_not_come_up(tmp_path):
    cfg = case_config()
    model = write_model(cfg, tmp_path / "model")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("E2E_FP8_TOKEN")}
    environ |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_SGL_KERNEL": "0"}
    additional = '{"e2e_fp8": {"power_2_scale": false, "amax_epsilon": 0.0}}'
    words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", "0", "--model", str(model)]
    words += ["--load-format", "dummy", "--skip-tokenizer-init", "--enforce-eager", "--additional-config", additional]
    words += ["--weight-transfer-config", '{"backend": "e2e_fp8"}']
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=400)
    assert done.returncode != 0
    assert "ConfigError: The rollout server's token is not set: set E2E_FP8_TOKEN" in done.stdout + done.stderr


def test_a_server_that_dies_at_once_is_reported(tmp_path):
    with pytest.raises(EngineError, match=r"ended during start-up \(exit code \d+\): .*no-such-flag.*log: "):
        ServerProcess(["--no-such-flag"], os.environ, tmp_path, timeout_s=200)
    assert "restart" not in (tmp_path / "server.log").read_text()


class Stranger(http.server.BaseHTTPRequestHandler):
    """A server that is healthy at every address."""

    def do_GET(self):
        self.server.asked.append(self.path)
        self.send_response(200)
        self.end_headers()


@pytest.mark.slow
def test_a_port_that_another_process_has_is_left_to_it(tmp_path):
    """As when it takes the port between the moment it was found free and the moment vLLM binds it."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Stranger) as stranger:
        stranger.asked = []
        threading.Thread(target=stranger.serve_forever, daemon=True).start()
        cfg = case_config("qwen3")
        process = start_server(cfg, write_model(cfg, tmp_path / "model"), tmp_path / "server", first_port=stranger.server_port)
        try:
            assert process.url != f"http://127.0.0.1:{stranger.server_port}"
            assert stranger.asked == []
            told = [line for line in process.log.read_text().splitlines() if line.startswith("e2e_fp8: ")]
            new_port = process.url.rpartition(":")[2]
            assert told == [f"e2e_fp8: another process took port {stranger.server_port} or one of vLLM's; restart 1 of 3 on {new_port}"]
            assert ServerClient(process.url, process.token, timeout_s=60).collective("weight_state")[0]["policy_version"] is None
            assert "Address already in use" not in process.last_words()
        finally:
            process.close()
            stranger.shutdown()
