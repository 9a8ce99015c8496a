"""Work that is ended from outside ends with the error that was given, and only if it has not ended before."""

from __future__ import annotations

import asyncio

import pytest

from deltawire.gateway.http.stoppable import Stoppable


def test_work_that_is_stopped_ends_with_the_error_and_the_task_goes_on() -> None:
    async def work() -> str:
        stoppable = Stoppable()
        asyncio.get_running_loop().call_soon(stoppable.stop, KeyError())
        asyncio.get_running_loop().call_soon(stoppable.stop, ValueError())  # the first one counts
        with pytest.raises(KeyError), stoppable:
            await asyncio.Event().wait()
        await asyncio.sleep(0)
        return "went on"

    assert asyncio.run(work()) == "went on"


def test_work_ends_after_its_time() -> None:
    async def work() -> None:
        with Stoppable(0.001):
            await asyncio.Event().wait()

    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(work())


def test_work_that_has_ended_is_not_stopped() -> None:
    async def work() -> int:
        with Stoppable(0.001) as stoppable:
            pass
        stoppable.stop(KeyError())
        await asyncio.sleep(0.01)
        return 5

    assert asyncio.run(work()) == 5


def test_an_error_of_the_work_is_not_replaced() -> None:
    async def work() -> None:
        with Stoppable() as stoppable:
            try:
                asyncio.get_running_loop().call_soon(stoppable.stop, KeyError())
                await asyncio.Event().wait()
            finally:
                raise ValueError("its own")

    with pytest.raises(ValueError, match="its own"):
        asyncio.run(work())


@pytest.mark.skipif(not hasattr(asyncio.Task, "uncancel"), reason="tasks do not count who cancels them")
def test_a_task_that_somebody_else_cancels_as_well_is_cancelled() -> None:
    async def work() -> None:
        task = asyncio.current_task()
        assert task is not None
        with Stoppable() as stoppable:
            asyncio.get_running_loop().call_soon(stoppable.stop, KeyError())
            asyncio.get_running_loop().call_soon(task.cancel)
            await asyncio.Event().wait()

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(work())
