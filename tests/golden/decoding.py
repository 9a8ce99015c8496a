"""The check that a codec decodes a golden delta file to what is on record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from make import facts

import deltawire
from deltawire.codec import using_codec


def check_decoding(codec: str, read_base: Callable[[], dict[str, Any]], delta: bytes, golden: Mapping[str, Any]) -> None:
    """Decode a delta in both ways, and compare the states and their digests with the manifest."""
    with using_codec(codec):
        state = read_base()
        assert deltawire.state_digest(state).hex() == golden["before"]
        patch = deltawire.resolve_delta(state, delta)
        deltawire.apply_delta(state, delta)
        assert facts(state) == golden["result"]
        assert deltawire.state_digest(state).hex() == golden["after"]
        state = read_base()
        patch.apply(state)
        assert facts(state) == golden["result"]
