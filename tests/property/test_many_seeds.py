"""Many seeds run in worker processes, and the command ends when a worker fails."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import pytest

from deltawire.testing.fleet_simulation.many_seeds import WorkerDied, run_many


class CannotBeLoaded:
    """A function that worker processes cannot load, such as one of `__main__`."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("not a number",)

    def __call__(self, seed: int) -> Any:
        raise AssertionError("it was loaded")


@pytest.mark.parametrize("simulate_one", [CannotBeLoaded(), os._exit], ids=["cannot be loaded", "dies"])
def test_a_worker_that_dies_ends_the_runs(simulate_one: Any) -> None:
    with pytest.raises(WorkerDied, match="ended before it had run its seeds"):
        run_many(range(1, 9), simulate_one, 1)


def test_an_error_of_a_seed_ends_the_runs() -> None:
    with pytest.raises(ZeroDivisionError):
        run_many(range(8), partial(divmod, 0), 1)
