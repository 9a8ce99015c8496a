"""A process of vLLM that is not woken up still reads its messages soon."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from deltawire.engines.vllm import lost_wakeups

shm_broadcast = pytest.importorskip("vllm.distributed.device_communicators.shm_broadcast", reason="vLLM is not installed")


def test_an_idle_reader_whose_wake_up_is_lost_looks_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm_broadcast, "SHM_READER_RECHECK_INTERVAL_MS", shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS)
    lost_wakeups.look_often()
    writer = shm_broadcast.MessageQueue(1, 1, max_chunk_bytes=1024, max_chunks=2)
    reader = shm_broadcast.MessageQueue.create_from_handle(writer.export_handle(), 0)
    monkeypatch.setattr(writer._spin_condition, "notify", lambda: None)  # every wake-up is lost
    reader._spin_condition.last_read = reader._spin_condition.busy_loop_s = -1.0  # it has been idle for long
    is_waiting, waits, wait = threading.Event(), list[int](), reader._spin_condition.wait

    def note(timeout_ms: int) -> None:
        waits.append(timeout_ms)
        is_waiting.set()
        wait(timeout_ms)

    monkeypatch.setattr(reader._spin_condition, "wait", note)
    got: list[Any] = []
    reading = threading.Thread(target=lambda: got.append(reader.dequeue(indefinite=True)))
    reading.start()
    assert is_waiting.wait(60)
    writer.enqueue("a call")
    reading.join(60)
    assert got == ["a call"]
    assert 0 < max(waits) <= lost_wakeups.MOST_MILLISECONDS


def test_a_vllm_without_this_setting_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(shm_broadcast, "SHM_READER_RECHECK_INTERVAL_MS")
    lost_wakeups.look_often()
    assert not hasattr(shm_broadcast, "SHM_READER_RECHECK_INTERVAL_MS")
