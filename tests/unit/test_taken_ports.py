"""What the libraries in use today say of a port that is taken."""

import socket
from datetime import timedelta

import pytest
from torch.distributed import DistNetworkError, TCPStore

from e2e_fp8.rollout.server_process import names_a_taken_port


@pytest.fixture
def taken():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_python_names_a_taken_port(taken):
    with pytest.raises(OSError, match="in use") as refused, socket.socket() as another:
        another.bind(("127.0.0.1", taken))
    assert names_a_taken_port(str(refused.value))


def test_torch_names_a_taken_port(taken):
    """As where the ranks of a server meet."""
    with pytest.raises(DistNetworkError) as refused:
        TCPStore("127.0.0.1", taken, 1, True, timeout=timedelta(seconds=5))
    assert names_a_taken_port(str(refused.value))


def test_nothing_else_is_taken_for_one():
    assert not names_a_taken_port("ConnectionRefusedError: [Errno 111] Connection refused on port 98")
