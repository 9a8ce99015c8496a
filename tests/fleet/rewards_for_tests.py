"""Rewards that member processes load by name."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any


def length(prompts: list[Any], completions: list[Any], completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


def held(prompts: list[Any], completions: list[Any], completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Return the rewards of `length`, after waiting while the file exists that the environment names.

    A second file, with the suffix `.reached`, shows that it waits.
    """
    hold = Path(os.environ["DELTAWIRE_TEST_HOLD"])
    hold.with_suffix(".reached").touch()
    while hold.exists():
        time.sleep(0.01)
    return length(prompts, completions, completion_ids)


def broken(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
    raise RuntimeError("this task has no answer")
