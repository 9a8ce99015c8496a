"""The transaction of a swap: all workers write and confirm an update, or all write the old values back."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import Protocol

from .layout_update import LayoutUpdate
from .update_types import Agree, Claim, Outcome, StagedUpdate

logger = logging.getLogger("vllm.deltawire")


class SwappedWeights(Protocol):
    """The steps of a transaction in one worker. A step that fails raises an error."""

    def check_ready(self, staged: StagedUpdate) -> None:
        """Check that the weights are those that the update was made for."""

    def write(self, update: LayoutUpdate, times: dict[str, float]) -> None:
        """Write the new values, and add how long it took."""

    def write_back(self, update: LayoutUpdate) -> None:
        """Write the old values."""

    def check(self, update: LayoutUpdate, *, new: bool) -> None:
        """Check that the weights are the new ones, or else exactly the old ones."""

    def note_made(self, staged: StagedUpdate) -> None:
        """Note the new version."""


def make_swap(weights: SwappedWeights, staged: StagedUpdate, agree: Agree, errors: list[str], times: dict[str, float]) -> Outcome:
    """Make the transaction. Adds what failed in this worker to `errors`, and how long its parts took to `times`.

    Parameters
    ----------
    weights
        The worker's weights.
    staged
        The update.
    agree
        Tells all workers whether this one has failed.
    errors
        Gets what failed in this worker.
    times
        Gets the duration of each part, in milliseconds.
    """
    with timed(times, "agree_ms"), noting(errors):
        weights.check_ready(staged)
    with timed(times, "agree_ms"):
        failed = _ask(agree, staged.claim, errors)
    if failed:
        return "refused"
    update, attempts = staged.update, len(errors)
    if update is not None:
        times["modules_loaded_anew"] = update.loaded
        with noting(errors):
            weights.write(update, times)
            with timed(times, "confirm_ms"):
                weights.check(update, new=True)
    with timed(times, "agree_ms"):
        failed = _ask(agree, None, errors, since=attempts)
    if not failed:
        with timed(times, "note_ms"), noting(errors):
            weights.note_made(staged)
            return "made"
        return "quarantined"
    if update is None:
        return "refused"
    attempts = len(errors)
    with noting(errors):
        weights.write_back(update)
        weights.check(update, new=False)
    failed = _ask(agree, None, errors, since=attempts)
    return "quarantined" if failed else "refused"


@contextlib.contextmanager
def noting(errors: list[str]) -> Iterator[None]:
    """Turn an exception into a note."""
    try:
        yield
    except Exception as error:
        logger.exception("deltawire: an update failed")
        errors.append(f"{type(error).__name__}: {error}")


@contextlib.contextmanager
def timed(times: dict[str, float], name: str) -> Iterator[None]:
    began = time.perf_counter()
    try:
        yield
    finally:
        times[name] = times.get(name, 0.0) + (time.perf_counter() - began) * 1e3


def _ask(agree: Agree, claim: Claim | None, errors: list[str], *, since: int = 0) -> bool:
    """Tell all workers whether this one noted an error. Returns whether any worker failed, or could not be asked."""
    try:
        failed = agree(len(errors) > since, claim if len(errors) == since else None)
    except Exception as error:
        logger.exception("deltawire: the workers could not agree")
        errors.append(f"{type(error).__name__}: {error}")
        return True
    if failed and len(errors) == since:
        errors.append(f"workers {list(failed)} failed")
    return bool(failed)
