"""A vLLM plugin for tests. It holds completions in the middle, so that a swap falls into them for certain.

    with Hold(folder / "hold", tokens=12) as hold:      the server has Hold.environment(folder / "hold")
        ...                                             a request begins
        hold.wait()                                     a completion has 12 tokens, and stops
        ...                                             the server swaps
    ...                                                 the completion continues

While the file named by DELTAWIRE_TEST_HOLD exists, EngineCore starts no step after a request has as many tokens as the file says. It
answers calls meanwhile, also those to swap, as it does between any two steps.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from live_server import wait_until

_VARIABLE = "DELTAWIRE_TEST_HOLD"


class Hold:
    """Holds the completions of a server in a `with` block."""

    def __init__(self, path: Path, tokens: int) -> None:
        self._path = path
        self._tokens = tokens

    @staticmethod
    def environment(path: Path) -> dict[str, str]:
        """Return the environment for a server whose completions can be held by this file."""
        return {_VARIABLE: str(path)}

    def __enter__(self) -> Hold:
        _noted(self._path).unlink(missing_ok=True)
        written = self._path.with_suffix(".new")
        written.write_text(str(self._tokens))
        written.replace(self._path)
        return self

    def wait(self) -> None:
        """Return when a completion is held."""
        wait_until(_noted(self._path).exists, "a completion that is held")

    def __exit__(self, *_: object) -> None:
        self._path.unlink()


def _noted(path: Path) -> Path:
    """Return the file that exists once a completion is held."""
    return path.with_suffix(".held")


def register() -> None:
    """Let EngineCore hold completions. vLLM calls it in each process of a server."""
    if _VARIABLE not in os.environ:
        return
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.engine.core import EngineCore

    if getattr(EngineCore.step, "can_hold", False):
        return
    path = Path(os.environ[_VARIABLE])

    def is_held(core: Any) -> bool:
        if core.scheduler.pause_state != PauseState.UNPAUSED:  # a swap finishes the steps in flight
            return False
        try:
            tokens = int(path.read_text())
        except FileNotFoundError:
            return False
        if all(request.num_output_tokens < tokens for request in core.scheduler.requests.values()):
            return False
        _noted(path).touch()
        return True

    def holding(step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @functools.wraps(step)
        def step_unless_held(core: Any) -> Any:
            return ({}, False) if is_held(core) else step(core)

        step_unless_held.can_hold = True  # type: ignore[attr-defined]
        return step_unless_held

    EngineCore.step = holding(EngineCore.step)
    EngineCore.step_with_batch_queue = holding(EngineCore.step_with_batch_queue)
