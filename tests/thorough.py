"""How thorough the tests with random examples are. `make test` runs few examples, which are the same ones each time.

`make fuzz-properties` sets DELTAWIRE_TEST_MORE, and then the same tests run that many times as many examples, different ones each time.
"""

from __future__ import annotations

import os

from hypothesis import settings

MORE = int(os.environ.get("DELTAWIRE_TEST_MORE", "1"))
"""The factor by which tests run more examples than usual."""


def examples(count: int) -> settings:
    """Return the decorator of a test that usually runs this many examples."""
    return settings(max_examples=count * MORE)
