"""Bytes compared while a real server already generates: what the tests of every device check, each for a server and a transport."""

import json
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from integration.armed_cases import Trainer, assert_held
from integration.server_cases import Served, generate, random_weights
from integration.torn_cases import SEEDS, kill, weights_of

from e2e_fp8.errors import ByteMismatchError, EngineError
from e2e_fp8.sync.receipt import manifest_of


class Request:
    """A generation request in a thread; ``said`` is its version header, or status and sentence of a refusal."""

    def __init__(self, served: Served) -> None:
        params = {"temperature": 0.7, "max_tokens": 8, "seed": 3, "detokenize": False}
        body = json.dumps({"token_ids": [2, 3, 7, 5], "sampling_params": params}).encode()
        headers = {"Authorization": f"Bearer {served.process.token}", "Content-Type": "application/json"}
        self._request = urllib.request.Request(f"{served.process.url}/inference/v1/generate", body, headers)
        self.said: tuple[object, ...] = ()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            with urllib.request.urlopen(self._request) as answer:
                self.said = answer.headers["x-policy-version"], tuple(json.load(answer)["choices"][0]["token_ids"])
        except urllib.error.HTTPError as error:
            self.said = error.code, json.load(error)["error"]["message"]

    @property
    def is_answered(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> tuple[object, ...]:
        self._thread.join(60)
        return self.said


def await_tokens(served: Served) -> None:
    """Long enough for a request to have its tokens, which other requests took less than."""
    time.sleep(1.0 if served.device == "cpu" else 0.5)


def held_back(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Comparisons of ``trainer`` wait until the event is set."""
    proof, go = trainer.publisher._comparisons.proof, threading.Event()

    def late(*args, **options):
        assert go.wait(60)
        return proof(*args, **options)

    monkeypatch.setattr(trainer.publisher._comparisons, "proof", late)
    return go


def check_answers_wait(served: Served, transport: str, version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unannounced and announced: the engine generates, no answer leaves before bytes were compared, and then all do."""
    trainer, tokens = Trainer(served, transport, version), []
    for turn, (seed, arms) in enumerate(((12, False), (11, True), (12, True))):
        go = held_back(trainer, monkeypatch)
        arms = arms and trainer.publisher.arm(version + turn, before="answers")
        new = trainer.write(seed)
        report = trainer.publish(version + turn, before="answers")
        assert (report.armed, report.receipt) == (arms, None)
        assert (report.answer_seconds > 0) == arms
        assert "resume" not in report.phases
        request = Request(served)
        await_tokens(served)
        assert not request.is_answered
        with pytest.raises(EngineError, match=r"\(409\): .*has not said that it compared bytes"):
            served.client.post("/resume")
        go.set()
        settled = report.settled()
        assert settled.receipt is not None
        fp8 = {name: digest for name, digest in manifest_of(trainer.entries).digests.items() if name in settled.receipt.digests}
        assert settled.receipt.digests == fp8
        assert settled.waited_seconds is not None
        assert settled.receipt_seconds >= settled.waited_seconds
        said = request.result()
        assert said[0] == str(version + turn), said
        tokens.append(said[1])
        trainer.publisher.settle()
        monkeypatch.undo()
        trainer.write(SEEDS[0])
        trainer.publish(version + turn, before="answers")
        assert generate(trainer.publisher.client), "a request over the trainer's own connection waits for the comparison, not it for that"
        trainer.write(seed)
        trainer.publish(version + turn)
        assert_held(served, version + turn, new)
    assert tokens[0] == tokens[2] != tokens[1]
    report = trainer.publish(version + 3, receipt=False)
    assert (report.receipt, report.pending) == (None, None)
    assert "resume" not in report.phases
    assert tuple(generate(served.client)) == tokens[0]
    trainer.publisher.close()


def check_difference(served: Served, transport: str, version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte that is another one in the engine: named, nothing that it made is answered, and the next update passes."""
    trainer, name = Trainer(served, transport, version), "model.layers.1.self_attn.o_proj.weight"
    comparisons, go = trainer.publisher._comparisons, held_back(trainer, monkeypatch)
    start, receipts = comparisons.start, comparisons._receipts
    assert receipts is not None
    place = receipts._table.names.index(name)

    def changed_meanwhile(*args, **options):
        found = start(*args, **options)()
        found[place] ^= 1
        return lambda: found

    trainer.write(12)
    monkeypatch.setattr(comparisons, "start", changed_meanwhile)
    report = trainer.publish(version, before="answers")
    # an optimizer step: what is compared, and named, is what was published
    trainer.write(13)
    request = Request(served)
    await_tokens(served)
    assert not request.is_answered
    go.set()
    with pytest.raises(ByteMismatchError, match=rf"1 parts .* {name} \(bytes differ\)"):
        report.settled()
    status, sentence = request.result()
    assert status == 503
    assert f"the receipt of policy version {version} failed" in str(sentence)
    with pytest.raises(EngineError, match=rf"\(503\): .*the receipt of policy version {version} failed"):
        generate(served.client)
    monkeypatch.undo()
    new = trainer.write(11)
    trainer.publish(version + 1)
    assert_held(served, version + 1, new)
    generate(served.client)
    trainer.publisher.close()


def check_killed_while_comparing(served: Served, transport: str, version: int) -> None:
    """What was generated meanwhile is refused, and so is everything until somebody publishes; the bytes are all of one version."""
    trainer = served.start_held("armed_process.py", transport, served.device, *SEEDS, version, phase="compare")
    request = Request(served)
    kill(served, trainer)
    status, sentence = request.result()
    assert status == 503
    assert "did not say in time" in str(sentence)
    refusal = rf"the trainer of policy version {version + 1} has not said that it compared"
    with pytest.raises(EngineError, match=rf"\(503\): Generation refused: {refusal}"):
        generate(served.client)
    with pytest.raises(EngineError, match=rf"\(409\): Cannot resume: {refusal}"):
        served.client.post("/resume")
    assert_held(served, version + 1, random_weights(served.cfg, SEEDS[1]))
    served.publish(transport, weights_of(served, SEEDS[0]), version + 2)
    assert_held(served, version + 2, random_weights(served.cfg, SEEDS[0]))
    generate(served.client)
