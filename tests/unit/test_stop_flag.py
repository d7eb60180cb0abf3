"""What a signal does, and when."""

import asyncio
import os
import signal

import pytest

from e2e_fp8.orchestration.loop import StepAbandoned, StopFlag


@pytest.fixture
def flag():
    flag = StopFlag()
    yield flag
    flag.restore()


def test_a_signal_asks_and_a_second_one_interrupts(flag):
    os.kill(os.getpid(), signal.SIGTERM)
    assert flag.requested
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_elsewhere_than_under_torchrun_a_step_is_finished(flag, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    with flag.abandoning():
        os.kill(os.getpid(), signal.SIGINT)
    assert flag.requested


def test_under_torchrun_a_rollout_is_left_at_once_also_inside_asyncio(flag, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")

    async def rollout() -> None:
        asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGTERM)
        await asyncio.sleep(60)

    with pytest.raises(StepAbandoned), flag.abandoning():
        asyncio.run(rollout())
    # after the block the weights change, so that only a second signal interrupts
    with pytest.raises(StepAbandoned), flag.abandoning():
        pytest.fail("a stop asked for before the block does not let it begin")
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)
