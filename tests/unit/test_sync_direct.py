"""Direct reads: what the trainer exports comes out byte for byte, and no announced place may lie outside it.

On a CPU everything goes through the staging buffer, which is shared memory as between two processes.
"""

import json
from typing import Any

import pytest
import torch

from e2e_fp8.errors import EngineError
from e2e_fp8.sync.buckets import UpdateManifest, plan_update
from e2e_fp8.sync.direct import DirectReceiver, DirectSender
from e2e_fp8.sync.shared_buffers import open_storage


class Link:
    """A sender whose parameters arrive as the JSON that a server would get."""

    def __init__(self) -> None:
        self.sender, self.opened = DirectSender(torch.device("cpu")), 0
        self.parameters: dict[str, Any] = {}
        self.receiver: DirectReceiver | None = None

    def init(self, info: dict[str, Any]) -> None:
        self.parameters = json.loads(json.dumps(info))["parameters"]
        self.opened += 1
        self.receiver = DirectReceiver(self.parameters)

    def sync(self, tensors: dict[str, torch.Tensor], version: int) -> tuple[UpdateManifest, dict[str, torch.Tensor]]:
        manifest = plan_update(list(tensors.items()), policy_version=version, max_bytes=1 << 62)
        received: dict[str, torch.Tensor] = {}

        def announce(update: dict[str, Any], *, first: bool, last: bool) -> None:
            assert (first, last) == (True, True)
            assert self.receiver is not None
            for _, named in self.receiver.receive(update, manifest, lambda spec: None):
                received.update(named)

        self.sender.open(manifest, tensors, self.init)
        self.sender.stage(manifest, tensors)
        self.sender.send(manifest, tensors, announce)
        return manifest, received


def weights(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    block = torch.randint(0, 255, (6, 40), dtype=torch.uint8).view(torch.float8_e4m3fn)
    return {
        "codes": block[:4],
        "gaps": block[:, 3:7],
        "scales": torch.randn(3, 5),
        "norm": torch.randn(7).bfloat16(),
        "empty": torch.ones(0),
    }


def test_bytes_arrive_and_a_settled_channel_stays_open():
    link = Link()
    for version, seed in enumerate((1, 2, 3)):
        sent = weights(seed)
        _, received = link.sync(sent, version)
        assert list(received) == list(sent)
        for name, tensor in sent.items():
            assert received[name].dtype == tensor.dtype
            assert torch.equal(received[name].contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8))
    assert link.opened == 1
    link.sync({"codes": weights(1)["codes"]}, 4)
    assert link.opened == 2


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ([-1, 1 << 40], "codes lies at bytes"),
        ([-1, -256], "codes lies at bytes"),
        ([0, 0], "no place"),
        ([-2, 0], "no place"),
        ([-1], "no place"),
        (["-1", 0], "no place"),
        ([-1, True], "no place"),
        (None, "no place"),
    ],
)
def test_a_place_outside_the_shared_memory_is_refused(place, why):
    link, tensors = Link(), {"codes": weights(1)["codes"]}
    manifest = plan_update(list(tensors.items()), policy_version=1, max_bytes=1 << 62)
    receivers: list[DirectReceiver] = []
    link.sender.open(manifest, tensors, lambda info: receivers.append(DirectReceiver({**info["parameters"], "places": [place]})))
    with pytest.raises(EngineError, match=why):
        next(receivers[0].receive({"buckets": [0]}, manifest, lambda spec: None))


def test_misaligned_and_foreign_layouts_are_refused():
    link = Link()
    manifest, _ = link.sync({"scales": weights(1)["scales"]}, 1)
    assert link.receiver is not None
    link.receiver._places, link.receiver._views = [[-1, 2]], []
    with pytest.raises(EngineError, match="scales lies at bytes 2"):
        next(link.receiver.receive({"buckets": [0]}, manifest, lambda spec: None))
    other = plan_update([("scales", torch.zeros(4))], policy_version=1, max_bytes=1 << 62)
    with pytest.raises(EngineError, match="another set of tensors"):
        next(link.receiver.receive({"buckets": [0]}, other, lambda spec: None))


@pytest.mark.parametrize("handle", [None, "handle", [], [0] * 8, [0, {"base64": "!"}, 1, 0, {"base64": ""}, 0, {"base64": ""}, True]])
def test_malformed_handles_are_refused(handle):
    with pytest.raises(EngineError, match="malformed handle"):
        open_storage(0, handle)
