"""Reward functions follow TRL's convention: the tests check their arguments, their return values, and how they are found."""

from __future__ import annotations

from typing import Any

import pytest

from deltawire.errors import RewardError
from deltawire.rl.rewards import load_reward, reward_name, score


def lengths(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def test_a_reward_gets_lists_by_name_as_trl_gives_them():
    seen: dict[str, Any] = {}

    def remember(**arguments: Any) -> list[float]:
        seen.update(arguments)
        return [1.0, 2.0]

    rows = score([remember], ["p", "p"], ["a", "b"], completion_ids=[[1], [2, 3]], columns={"answer": ["x", "x"]})
    assert seen == {"prompts": ["p", "p"], "completions": ["a", "b"], "completion_ids": [[1], [2, 3]], "answer": ["x", "x"]}
    assert rows == [(1.0,), (2.0,)]


def test_several_rewards_stand_side_by_side_and_none_stays_none():
    async def sometimes(completions: list[str], **_: Any) -> list[float | None]:
        return [None if text == "a" else 1 for text in completions]

    rows = score([lengths, sometimes], ["p", "p"], ["a", "bb"], completion_ids=[[1], [2, 3]])
    assert rows == [(1.0, None), (2.0, 1.0)]
    assert [reward_name(lengths), reward_name(sometimes)] == ["lengths", "sometimes"]


def test_without_rewards_every_completion_has_an_empty_row():
    assert score([], ["p"], ["a"], completion_ids=[[1]]) == [()]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0], "returned 1 rewards for 2 completions"),
        ([1.0, float("nan")], "rewards must be finite"),
        ([1.0, float("inf")], "rewards must be finite"),
        ([1.0, 1e39], r"returned 1e\+39; rewards must be from -1e\+09 to 1e\+09"),
        ([1.0, -1.1e9], r"rewards must be from -1e\+09 to 1e\+09"),
        ([1.0, "good"], "'good', which is not a number"),
        (3.0, "not a list"),
    ],
)
def test_a_value_that_is_no_reward_is_refused(returned: Any, message: str):
    with pytest.raises(RewardError, match=message):
        score([lambda **_: returned], ["p", "p"], ["a", "b"], completion_ids=[[1], [2]])


def test_a_reward_that_wants_a_column_that_is_not_there_says_which():
    def right(completions: list[str], answer: list[str], hint: str = "", **_: Any) -> list[float]:
        return [1.0 for _ in completions]

    with pytest.raises(RewardError, match=r"'right' needs the column 'answer', which the dataset does not have\. It has: prompts, sol"):
        score([right], ["p"], ["a"], completion_ids=[[1]], columns={"solution": ["a"]})
    assert score([right], ["p"], ["a"], completion_ids=[[1]], columns={"answer": ["a"]}) == [(1.0,)]


def test_a_reward_that_fails_is_named():
    def broken(**_: Any) -> list[float]:
        raise KeyError("answer")

    with pytest.raises(RewardError, match="'broken' failed: KeyError"):
        score([broken], ["p"], ["a"], completion_ids=[[1]])


def test_a_reward_is_found_by_module_and_name():
    assert load_reward("deltawire.rl.rewards:score") is score
    assert load_reward("collections:OrderedDict.fromkeys")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("math", "write MODULE:FUNCTION"),
        (":sin", "write MODULE:FUNCTION"),
        ("no_such_module:reward", "the module 'no_such_module' of"),
        ("deltawire.nowhere:reward", "the module 'deltawire.nowhere' of"),
        ("needs_another:reward", "imports 'no_such_library', which is not installed"),
        ("breaks:reward", "importing 'breaks' failed: ZeroDivisionError"),
        ("math:reward", "has no 'reward'"),
        ("math:pi", "is not a function but a float"),
    ],
)
def test_a_missing_reward_function_gives_a_plain_error(spec: str, message: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "needs_another.py").write_text("import no_such_library\n")
    (tmp_path / "breaks.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RewardError, match=message):
        load_reward(spec)


def test_the_error_about_a_spec_names_the_kind_of_function():
    with pytest.raises(RewardError, match="'math' does not name a redaction function: write MODULE:FUNCTION"):
        load_reward("math", what="redaction function")
