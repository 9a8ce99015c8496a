"""The workers of a vLLM server check what clients give them, before they do anything."""

from __future__ import annotations

from typing import Any

import pytest

from deltawire.engines.vllm import checked_arguments
from deltawire.engines.vllm.checked_arguments import checked, find_wrong_setting, is_flag, is_number, is_text

SETTINGS: dict[str, Any] = {
    "mirror": None,
    "spool": None,
    "url": "s3://bucket/run",
    "run": None,
    "trusted_keys": ["ab" * 32],
    "confirm": "auto",
    "threads": None,
    "gpu_share": 0.025,
    "relays": [],
    "undo_bytes": 0,
}


@pytest.mark.parametrize(
    "right", [{}, {"spool": "/dev/shm/x"}, {"threads": 4, "gpu_share": 1, "undo_bytes": 1 << 40, "confirm": "written"}]
)
def test_settings_that_can_be_used_are_accepted(right: dict[str, Any]) -> None:
    assert find_wrong_setting({**SETTINGS, **right}) is None


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("spool", [5, "a\0b", ["x"]]),
        ("mirror", [5, {}]),
        ("run", [5]),
        ("trusted_keys", ["ab" * 32, ["nonsense"], [5], None]),
        ("relays", [[5], "s3://bucket/run", None]),
        ("confirm", ["nothing", None, [], 5]),
        ("threads", [0, -1, "x", 1.5, True]),
        ("gpu_share", [0, -1, 1.5, float("nan"), "x", None, True]),
        ("undo_bytes", [-1, "x", None, 1.5]),
        ("url", [None]),
    ],
)
def test_settings_that_cannot_be_used_are_refused_by_name(name: str, values: list[Any]) -> None:
    for value in values:
        reason = find_wrong_setting({**SETTINGS, name: value})
        assert reason is not None, value
        assert name in reason or "URL" in reason


@pytest.mark.parametrize(
    ("check", "right", "wrong"),
    [
        (is_number, [0, 5, "7"], [-1, 1.5, "x", "-1", "", None, True, [], 10**5000, "9" * 5000]),
        (is_text, ["x", ""], [None, 5, b"x", "\0"]),
        (is_flag, [True, False], [None, "x", [], 2]),
        (checked_arguments.is_mapping, [{}, {"a": 1}], [None, "x", [("a", 1)]]),
        (checked_arguments.is_list_of_text, [[], ["a"]], [None, "a", [5], {"a": 1}]),
    ],
)
def test_values_are_checked(check: Any, right: list[Any], wrong: list[Any]) -> None:
    assert all(check(value) is True for value in right)
    assert not any(check(value) for value in wrong)


def test_a_method_is_not_called_with_wrong_arguments() -> None:
    calls: list[tuple[Any, ...]] = []

    def swap(worker: str, seq: int, anew: bool = False) -> str:
        calls.append((worker, seq, anew))
        return "made"

    method = checked(swap, lambda worker, reason: f"{worker} refused: {reason}", seq=is_number, anew=is_flag)
    assert (method("a", 5), method("a", 5, True), method("a", seq=5)) == ("made", "made", "made")
    assert calls == [("a", 5, False), ("a", 5, True), ("a", 5, False)]
    for arguments in ((), ("x",), (5, "x"), (5, True, 1)):
        assert method("a", *arguments).startswith("a refused: swap: ")
    assert len(calls) == 3
