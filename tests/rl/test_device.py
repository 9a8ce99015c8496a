"""The device of the model of `serve` and of members."""

from __future__ import annotations

import pytest

from deltawire.errors import EngineError
from deltawire.rl.member import pick_device


@pytest.mark.parametrize("name", ["cuda:99", "gpu"])
def test_a_device_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(EngineError, match=rf"^the device '{name}' is not available here: .*\. Use --device cpu\.$"):
        pick_device(name)


def test_a_device_that_is_there_is_taken() -> None:
    assert pick_device("cpu") == "cpu"
    assert pick_device("auto") in ("cpu", "cuda")
