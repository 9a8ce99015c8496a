"""The task of the example: write words with low numbers. Members import the reward from here."""

from __future__ import annotations

from typing import Any

ROWS = [{"prompt": f"w{number} w{number + 1}"} for number in range(90)]


def low_words(completions: list[str], **_: Any) -> list[float]:
    """Return the reward: the share of the words w0 to w31."""
    words = [completion.split() for completion in completions]
    return [sum(int(word[1:]) < 32 for word in each) / max(1, len(each)) for each in words]
