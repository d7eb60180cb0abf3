"""Announced updates, as the tests of every device check them: each check takes a server, a transport and its first policy version."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from integration.server_cases import Served, assert_live, exported, generate, random_weights
from integration.torn_cases import SEEDS, kill, weights_of

from e2e_fp8.errors import EngineError
from e2e_fp8.sync.announcer import ArmedUpdate
from e2e_fp8.sync.publish_report import PublishReport

ANNOUNCED = r"\(409\): A trainer has announced a weight update"


class Trainer:
    """One tuple whose memory is written anew for each version, and its publisher."""

    def __init__(self, served: Served, transport: str, version: int) -> None:
        """Publishes twice, so that ``version`` is the next one and can be announced."""
        self.served, self.publisher = served, served.publisher(transport)
        self.weights = {name: tensor.clone() for name, tensor in weights_of(served, SEEDS[0]).items()}
        self.entries = tuple(exported(self.weights))
        self.old = random_weights(served.cfg, SEEDS[0])
        for earlier in (version - 2, version - 1):
            assert not self.publisher.arm(earlier)
            assert "not published twice" in self.publisher.not_armed
            assert not self.publish(earlier).armed

    def write(self, seed: int) -> dict[str, torch.Tensor]:
        """What an optimizer step does; the new weights, on the CPU."""
        new = random_weights(self.served.cfg, seed)
        for name, tensor in new.items():
            self.weights[name].copy_(tensor)
        return new

    def publish(self, version: int, **options) -> PublishReport:
        return self.publisher.publish(self.entries, policy_version=version, **options)

    def arm(self, version: int, **options) -> None:
        assert self.publisher.arm(version, **options), self.publisher.not_armed


def assert_held(served: Served, version: int, weights: dict[str, torch.Tensor]) -> None:
    """Every rank holds its part of ``weights``, which are ``version``."""
    versions = served.versions()
    assert set(versions) == {version}
    for rank in range(len(versions)):
        assert_live(served, weights, rank=rank, size=len(versions))


def check_armed(served: Served, trainer: Trainer, version: int, seed: int, **options) -> PublishReport:
    """Announced, trained, published: the new bytes are live."""
    trainer.arm(version, **options)
    new = trainer.write(seed)
    report = trainer.publish(version, **options)
    assert report.armed
    assert_held(served, version, new)
    return report


def check_several(served: Served, transport: str, version: int) -> None:
    """Announced ones in a row and in turn with others, with receipts and without."""
    trainer, answers = Trainer(served, transport, version), []
    for turn, seed in enumerate((12, 11, 12)):
        report = check_armed(served, trainer, version + turn, seed)
        assert report.receipt is not None
        assert report.seconds == pytest.approx(sum(report.phases[phase] for phase in ("plan", "stage", "send")))
        answers.append(generate(served.client))
    assert answers[0] == answers[2] != answers[1]
    plain = trainer.publish(version + 3)
    assert not plain.armed
    assert plain.receipt is not None
    assert report.receipt is not None
    assert plain.receipt.digests == report.receipt.digests
    report = check_armed(served, trainer, version + 4, 11, receipt=False, in_flight="abort")
    assert report.receipt is None
    assert report.receipt_seconds == 0
    assert generate(served.client) == answers[1]
    check_armed(served, trainer, version + 5, 12)
    trainer.publisher.close()
    assert generate(served.client) == answers[0]


def check_cancelled(served: Served, transport: str, version: int) -> None:
    """While announced the server refuses everything at once; taken back, the old version serves."""
    trainer = Trainer(served, transport, version)
    before = generate(served.client)
    trainer.arm(version)
    trainer.write(12)
    await_announced(served)
    with pytest.raises(EngineError, match=r"\(503\): Generation refused"):
        generate(served.client)
    for route in ("/resume", "/pause?mode=wait", "/start_weight_update", "/weight_update?pause=wait", "/collective_rpc"):
        with pytest.raises(EngineError, match=ANNOUNCED):
            served.client.post(route, {"method": "weight_state"})
    with pytest.raises(EngineError, match=ANNOUNCED):
        served.publisher("ipc")
    trainer.publisher.disarm()
    assert generate(served.client) == before
    assert_held(served, version - 1, trainer.old)
    trainer.arm(version)
    assert trainer.publisher.policy_version() == version - 1, "whoever asks the engine takes the announcement back"
    check_armed(served, trainer, version, 12)
    trainer.arm(version + 1)
    trainer.publisher.close()
    assert generate(served.client) != before


def check_another_publish(served: Served, transport: str, version: int) -> None:
    """Another version, options or tensors than announced are published as if nothing had been."""
    trainer = Trainer(served, transport, version)
    trainer.arm(version)
    new = trainer.write(12)
    assert not trainer.publish(version + 1).armed
    assert_held(served, version + 1, new)
    trainer.arm(version + 2)
    assert not trainer.publish(version + 2, receipt=False).armed
    trainer.arm(version + 3)
    assert not trainer.publisher.publish(exported(trainer.weights), policy_version=version + 3).armed
    assert_held(served, version + 3, new)
    assert not trainer.publisher.arm(version + 4)
    with pytest.raises(EngineError, match="came twice"):
        trainer.publisher.publish([*trainer.entries, trainer.entries[0]], policy_version=version + 4)
    for again in (version + 5, version + 6):
        trainer.publish(again)
    served.publish("ipc", weights_of(served, SEEDS[0]), version + 7)
    trainer.arm(version + 8)
    assert not trainer.publish(version + 8).armed, "another trainer has published since the last time"
    assert_held(served, version + 8, new)
    for again in (version + 9, version + 10):
        trainer.publish(again)
    check_armed(served, trainer, version + 11, 11)
    trainer.publisher.close()
    generate(served.client)


def check_patience(served: Served, transport: str, version: int) -> None:
    """An engine that waits too long serves the old version again, by itself; what is published then comes without announcement."""
    trainer = Trainer(served, transport, version)
    before = generate(served.client)
    trainer.arm(version, patience_s=1.5)
    new = trainer.write(12)
    # else the request could come before the announcement
    await_announced(served)
    assert await_served(served) == before
    assert_held(served, version - 1, trainer.old)
    report = trainer.publish(version)
    assert not report.armed
    assert report.receipt is not None
    assert_held(served, version, new)
    check_armed(served, trainer, version + 1, 11)
    trainer.publisher.close()


def check_requests_in_flight(served: Served, transport: str, version: int) -> None:
    """They end under the version they began with, and the announced update waits for them; others are refused, or come after it."""
    trainer, answers, begun = Trainer(served, transport, version), [], threading.Semaphore(0)
    params = {"max_tokens": 48, "ignore_eos": True, "detokenize": False}
    body = json.dumps({"token_ids": [2, 3, 7, 5], "sampling_params": params}).encode()
    headers = {"Authorization": f"Bearer {served.process.token}", "Content-Type": "application/json"}

    def request() -> None:
        begun.release()
        try:
            with urllib.request.urlopen(urllib.request.Request(f"{served.process.url}/inference/v1/generate", body, headers)) as answer:
                answers.append((answer.headers["x-policy-version"], len(json.load(answer)["choices"][0]["token_ids"])))
        except urllib.error.HTTPError as error:
            answers.append((error.code, 0))

    requests = [threading.Thread(target=request) for _ in range(4)]
    for thread in requests:
        thread.start()
    for _ in requests:
        begun.acquire()
    time.sleep(0.02)
    check_armed(served, trainer, version, 12)
    for thread in requests:
        thread.join()
    assert len(answers) == len(requests)
    # on a GPU the update may be over before a loaded machine has sent the last request
    assert set(answers) <= {(str(version - 1), 48), (str(version), 48), (503, 0)}, answers
    trainer.publisher.close()


CHECKS = (check_several, check_cancelled, check_another_publish, check_patience, check_requests_in_flight)


def check_failure(served: Served, transport: str, version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer that fails before its word leaves the old version serving; after it, a refusal."""
    trainer = Trainer(served, transport, version)
    before = generate(served.client)

    def fail(*args: object) -> None:
        raise KeyboardInterrupt

    trainer.arm(version)
    trainer.write(12)
    monkeypatch.setattr(type(trainer.publisher._sender), "stage", fail)
    with pytest.raises(KeyboardInterrupt):
        trainer.publish(version)
    monkeypatch.undo()
    assert generate(served.client) == before
    assert_held(served, version - 1, trainer.old)
    for again in (version, version + 1):
        assert not trainer.publish(again).armed
    trainer.arm(version + 2)
    monkeypatch.setattr(ArmedUpdate, "written", fail)
    with pytest.raises(KeyboardInterrupt):
        trainer.publish(version + 2)
    monkeypatch.undo()
    with pytest.raises(EngineError, match=r"\(503\): Generation refused"):
        generate(served.client)
    for again in (version + 3, version + 4):
        trainer.publish(again)
    check_armed(served, trainer, version + 5, 11)
    trainer.publisher.close()


def start_armed(served: Served, transport: str, version: int, phase: str) -> subprocess.Popen:
    """A trainer process that has published ``version`` and is held at a phase of the next one; see armed_process.py."""
    return served.start_held("armed_process.py", transport, served.device, *SEEDS, version, phase=phase)


def check_killed_while_armed(served: Served, transport: str, version: int) -> None:
    """The server serves the old version again, and nobody has to tell it to."""
    trainer = start_armed(served, transport, version, "armed")
    await_announced(served)
    kill(served, trainer)
    await_served(served)
    assert_held(served, version, random_weights(served.cfg, SEEDS[0]))
    served.publish("ipc", weights_of(served, SEEDS[1]), version + 1)
    assert_held(served, version + 1, random_weights(served.cfg, SEEDS[1]))
    generate(served.client)


def check_killed_after_its_word(served: Served, transport: str, version: int) -> None:
    """All of the new version, which nobody has compared, and with it a refusal until somebody publishes."""
    kill(served, start_armed(served, transport, version, "go"))
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with pytest.raises(EngineError, match=r"\(503\): Generation refused"):
            generate(served.client)
        with pytest.raises(EngineError, match=r"\(409\)") as refused:
            served.client.post("/resume")
        if "announced" not in str(refused.value):
            break
        time.sleep(0.1)
    assert f"the trainer of policy version {version + 1} has not said that it compared" in str(refused.value)
    for again in (version + 2, version + 3):
        served.publish("ipc", weights_of(served, SEEDS[1]), again)
    assert_held(served, version + 3, random_weights(served.cfg, SEEDS[1]))
    generate(served.client)


def check_server_killed_while_armed(served: Served, transport: str, version: int) -> None:
    """One sentence at the trainer, which does not hang. Ends the server."""
    trainer = Trainer(served, transport, version)
    trainer.arm(version)
    await_announced(served)
    os.killpg(served.process.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match="cannot be reached"):
        trainer.publish(version)
    trainer.publisher.close()


def check_engine_killed_while_armed(served: Served, transport: str, version: int) -> None:
    """The front end outlives its engine, and the trainer knows within seconds. Ends the engine."""
    trainer = Trainer(served, transport, version)
    trainer.arm(version)
    await_announced(served)
    engines = [p for p in psutil.Process(served.process.pid).children(recursive=True) if "EngineCore" in " ".join((p.name(), *p.cmdline()))]
    assert engines
    for engine in engines:
        engine.kill()
    started = time.monotonic()
    with pytest.raises(EngineError, match="The engine died during a weight update"):
        trainer.publish(version)
    trainer.publisher.close()
    assert time.monotonic() - started < 20


def await_announced(served: Served) -> None:
    """Until the server knows that an update is announced."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            served.versions()
        except EngineError as error:
            if "announced a weight update" in str(error):
                return
            raise
        time.sleep(0.02)
    raise AssertionError("no update was announced")


def await_served(served: Served) -> list[int]:
    """Tokens, once the server generates."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            return generate(served.client)
        except EngineError as error:
            if "(503): Generation refused" not in str(error):
                raise
        time.sleep(0.05)
    raise AssertionError("the server did not come back")
