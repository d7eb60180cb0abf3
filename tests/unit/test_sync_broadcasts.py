"""The broadcast transport between two real gloo ranks: large tensors alone, small ones packed, some received where they belong."""

from typing import Any

import pytest
import torch

from e2e_fp8.errors import EngineError
from e2e_fp8.sync.broadcasts import NcclReceiver, NcclSender
from e2e_fp8.sync.buckets import plan_update

CPU = torch.device("cpu")


def weights(seed: int, count: int = 9) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    sizes = [40 + 97 * index for index in range(count)]
    tensors = {f"t{index}": torch.randint(0, 255, (size, 4), dtype=torch.uint8) for index, size in enumerate(sizes)}
    return tensors | {"gaps": torch.randn(200, 8)[:, :4], "bf16": torch.randn(300, 3).bfloat16()}


def test_every_update_arrives_whole_and_placed_tensors_skip_the_buffers():
    sender, receivers = NcclSender(CPU, engine_ranks=1, host="127.0.0.1", timeout_s=30), []
    own = {"t8": torch.zeros(40 + 97 * 8, 4, dtype=torch.uint8)}

    def init(info: dict[str, Any]) -> None:
        receivers.append(NcclReceiver(info["parameters"], rank=1, device=CPU))

    for version, seed in enumerate((1, 2, 3, 1)):
        sent, received = weights(seed), {}
        manifest = plan_update(list(sent.items()), policy_version=version, max_bytes=4096, alone_bytes=1500)
        assert any(len(bucket) == 1 for bucket in manifest.buckets)
        assert any(len(bucket) > 1 for bucket in manifest.buckets)

        def announce(update: dict[str, Any], *, first: bool, last: bool, manifest=manifest, received=received) -> None:
            seen = []
            for index, named in receivers[0].receive(update, manifest, lambda spec: own.get(spec.name)):
                seen.append(index)
                received |= {name: tensor.clone() for name, tensor in named.items()}
            assert seen == list(range(len(manifest.buckets)))

        sender.open(manifest, sent, init)
        sender.stage(manifest, sent)
        sender.send(manifest, sent, announce)
        assert "t8" not in received
        received["t8"] = own["t8"]
        assert received.keys() == sent.keys()
        assert all(torch.equal(received[name], tensor) for name, tensor in sent.items())
    assert len(receivers) == 1
    sender.close()
    receivers[0].close()


def test_a_refusal_of_the_engine_ends_the_broadcast():
    sender, receivers = NcclSender(CPU, engine_ranks=1, host="127.0.0.1", timeout_s=10), []
    sent = weights(1)
    manifest = plan_update(list(sent.items()), policy_version=1, max_bytes=4096)
    sender.open(manifest, sent, lambda info: receivers.append(NcclReceiver(info["parameters"], rank=1, device=CPU)))

    def announce(update: dict[str, Any], *, first: bool, last: bool) -> None:
        receivers[0].close()
        raise EngineError("the engine refuses")

    with pytest.raises(EngineError, match="the engine refuses"):
        sender.send(manifest, sent, announce)
    sender.close()
