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


def experts(block: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gate, up, gate, up, ... of one block of memory, and down projections, that lie elsewhere and in reverse."""
    named = {}
    for expert, rows in enumerate(block.chunk(3)):
        gate, up = rows.chunk(2)
        named |= {f"m.experts.{expert}.gate_proj.weight": gate, f"m.experts.{expert}.up_proj.weight": up}
    return named


@pytest.mark.parametrize("width", [64, 21])
def test_a_layers_experts_are_one_message_from_and_into_the_memory_where_they_lie(width):
    """With rows of 21 bytes an expert's size is no multiple of the alignment: the bucket has gaps and is packed. Then the engine's move."""
    sender, receivers = NcclSender(CPU, engine_ranks=1, host="127.0.0.1", timeout_s=30), []
    source, target = torch.empty(90, width, dtype=torch.uint8), torch.zeros(90, width, dtype=torch.uint8)
    down = torch.empty(3, 40, width, dtype=torch.uint8)
    sent = experts(source) | {f"m.experts.{e}.down_proj.weight": down[2 - e] for e in range(3)} | {"m.gate.weight": torch.ones(7)}
    manifest = plan_update(list(sent.items()), policy_version=0, max_bytes=1 << 20, alone_bytes=1024)
    whole = [bucket for bucket in manifest.buckets if len(bucket) == 6]
    assert len(whole) == (1 if width == 64 else 0)
    for version in range(4):
        source.copy_(torch.randint(0, 256, source.shape))
        down.copy_(torch.randint(0, 256, down.shape))
        if version == 3:
            target = torch.zeros_like(target)
        own, received, now = experts(target), {}, manifest.at_version(version)

        def announce(update: dict[str, Any], *, first: bool, last: bool, own=own, received=received, now=now) -> None:
            for _, named in receivers[0].receive(update, now, lambda spec: own.get(spec.name)):
                received |= {name: tensor.clone() for name, tensor in named.items()}

        sender.open(now, sent, lambda info: receivers.append(NcclReceiver(info["parameters"], rank=1, device=CPU)))
        sender.send(now, sent, announce)
        straight = sent.keys() - received.keys()
        assert straight == (experts(target).keys() if width == 64 else set())
        found = received | {name: own[name] for name in straight}
        assert all(torch.equal(found[name], tensor) for name, tensor in sent.items())
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
