"""Files of live traffic that were changed at random are refused with a named error, or are files that a writer could have written.

`make fuzz-properties` runs many more examples than `make test`.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from live_samples import FEEDBACK, FULL, INTERACTIONS, METRICS, PLAIN
from thorough import examples

from deltawire.errors import CorruptFeedback, CorruptInteractions, CorruptRecord, UnsupportedVersion
from deltawire.format.feedback import FeedbackFile
from deltawire.format.interactions import Interactions
from deltawire.format.records.live_records import Metrics

KINDS: list[tuple[Any, bytes, Any]] = [
    (Interactions, INTERACTIONS.to_bytes(), CorruptInteractions),
    (Interactions, replace(INTERACTIONS, interactions=(PLAIN, replace(FULL, diverted_from="beta"))).to_bytes(), CorruptInteractions),
    (FeedbackFile, FEEDBACK.to_bytes(), CorruptFeedback),
    (Metrics, METRICS.to_bytes(), CorruptRecord),
]


def divided(kind: Any, data: bytes) -> tuple[bytes, bytes]:
    """Return the record of a file, and what follows it."""
    end = 8 + int.from_bytes(data[:8], "little")
    return (data[8:end], data[end:]) if kind is Interactions else (data, b"")


def put_together(kind: Any, record: bytes, rest: bytes) -> bytes:
    return len(record).to_bytes(8, "little") + record + rest if kind is Interactions else record


@pytest.mark.parametrize(("kind", "data", "error"), KINDS)
@examples(100)
@given(st.binary(max_size=300))
def test_noise_is_refused(kind: Any, data: bytes, error: Any, noise: bytes) -> None:
    with pytest.raises(error):
        kind.parse(noise)


@pytest.mark.parametrize(("kind", "data", "error"), KINDS)
@examples(100)
@given(index=st.integers(0, 4000), patch=st.binary(min_size=1, max_size=8))
def test_a_patch_anywhere_is_refused_or_leaves_a_file_that_is_one(kind: Any, data: bytes, error: Any, index: int, patch: bytes) -> None:
    index %= len(data)
    patched = (data[:index] + patch + data[index + len(patch) :])[: len(data)]
    with contextlib.suppress(error, UnsupportedVersion):
        assert kind.parse(patched).to_bytes() == patched


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize(("kind", "data", "error"), KINDS)
@examples(100)
@given(draw=st.data())
def test_any_field_with_any_value_is_refused_or_leaves_a_file_that_is_one(kind: Any, data: bytes, error: Any, draw: Any) -> None:
    def edit(plain: Any) -> None:
        inner = plain
        while True:
            keys = list(inner) if isinstance(inner, dict) else list(range(len(inner)))
            key = draw.draw(st.sampled_from(keys))
            if not isinstance(inner[key], (dict, list)) or not inner[key] or draw.draw(st.booleans()):
                break
            inner = inner[key]
        inner[key] = draw.draw(JSON)

    record, rest = divided(kind, data)
    plain = json.loads(record)
    edit(plain)
    changed = put_together(kind, json.dumps(plain, sort_keys=True, separators=(",", ":")).encode(), rest)
    with contextlib.suppress(error, UnsupportedVersion):
        assert kind.parse(changed).to_bytes() == changed
