"""Digests of what arrives message by message: each segment is read after its last message, none before, in the tensors' own order."""

import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from references.digest_reference import digest_of_tensor

from e2e_fp8.numerics.arriving_digests import ArrivingDigests


def random_tensors(count: int) -> list[torch.Tensor]:
    matrix = torch.zeros(64, 48, dtype=torch.uint8)
    return [torch.zeros(random.randrange(1, 700), dtype=torch.uint8) for _ in range(count)] + [matrix[:, :17], matrix[:, 20:36]]


@pytest.mark.parametrize("segment_bytes", [1, 900, 1 << 30])
@pytest.mark.parametrize("order", ["ascending", "random"])
def test_live_bytes_are_read_once_their_message_is_written(segment_bytes, order):
    tensors = random_tensors(23)
    messages = [random.randrange(7) for _ in tensors]
    arriving = ArrivingDigests(tensors, messages, segment_bytes=segment_bytes)
    for _ in range(3):
        arriving.begin()
        numbers = list(range(9)) if order == "ascending" else random.sample(range(9), 9)
        for message in numbers:
            for tensor, of in zip(tensors, messages, strict=True):
                if of == message:
                    tensor.copy_(torch.randint(0, 256, tensor.shape, dtype=torch.uint8))
            arriving.written(message)
        found = arriving.collect()
        assert found.dtype == np.uint64
        assert found.tolist() == [digest_of_tensor(tensor) for tensor in tensors]


def test_a_message_that_never_came_is_an_error_not_an_old_digest():
    tensors = random_tensors(5)
    messages = [index % 3 for index in range(len(tensors))]
    arriving = ArrivingDigests(tensors, messages, segment_bytes=1)
    for missing in (None, 1):
        arriving.begin()
        for message in range(3):
            if message != missing:
                arriving.written(message)
        if missing is None:
            arriving.collect()
            continue
        with pytest.raises(RuntimeError, match="before all of it was written"):
            arriving.collect()


def test_segments_end_between_messages_and_hold_what_was_asked_for():
    tensors = [torch.zeros(100, dtype=torch.uint8) for _ in range(10)]
    arriving = ArrivingDigests(tensors, [0, 0, 0, 1, 1, 2, 3, 3, 3, 3], segment_bytes=250)
    assert [sorted(messages) for messages, _, _ in arriving._segments] == [[0], [1, 2], [3]]
