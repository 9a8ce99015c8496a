"""Reward functions, by TRL's convention: the same function serves TRL's trainers and this fleet.

>>> def brevity(prompts, completions, **columns):
...     return [-float(len(completion)) for completion in completions]

A reward function gets lists with one item per completion, by name: `prompts`, `completions`, `completion_ids` (lists of token ids), and
every other column of the dataset. It returns one number per completion, from -10^9 to 10^9, or None for a completion that it does not
score. It may be asynchronous.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from ..errors import RewardError, UnusableReward
from ..fleet.rules.training_limits import LARGEST_REWARD

RewardFunction: TypeAlias = Callable[..., Any]


def load_reward(spec: str, *, what: str = "reward function") -> RewardFunction:
    """Return the function that `spec` names.

    Raises `UnusableReward` if the module or the function cannot be loaded.

    Parameters
    ----------
    spec
        MODULE:FUNCTION. The function's name may have dots.
    what
        The kind of function, for the message of the error.
    """
    module_name, colon, name = spec.partition(":")
    if not colon or not module_name or not name:
        raise UnusableReward(f"{spec!r} does not name a {what}: write MODULE:FUNCTION.")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise UnusableReward(
                f"the module {error.name!r} of {spec!r} does not exist. Check that its folder is on PYTHONPATH."
            ) from error
        raise UnusableReward(f"{module_name!r} imports {error.name!r}, which is not installed.") from error
    except Exception as error:
        raise UnusableReward(f"importing {module_name!r} failed: {type(error).__name__}: {error}.") from error
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise UnusableReward(f"{module_name!r} has no {name!r}.") from None
    if not callable(found):
        raise UnusableReward(f"{spec!r} is not a function but a {type(found).__name__}.")
    return found  # type: ignore[no-any-return]


def reward_name(function: RewardFunction) -> str:
    """Return the name of a reward: the function's own name."""
    return str(getattr(function, "__name__", type(function).__name__))


def score(
    functions: Sequence[RewardFunction],
    prompts: Sequence[Any],
    completions: Sequence[Any],
    *,
    completion_ids: Sequence[Sequence[int]],
    columns: Mapping[str, Sequence[Any]] | None = None,
) -> list[tuple[float | None, ...]]:
    """Return the rewards of each completion, one per function.

    Raises `UnusableReward` if a function needs a column that the dataset lacks. Raises `RewardError` if a function fails, returns a wrong
    number of rewards, or returns anything other than None and numbers from `-LARGEST_REWARD` to `LARGEST_REWARD`. One NaN, or one number
    that is infinite in float32, would spoil the whole training step.
    """
    arguments = {**(columns or {}), "prompts": list(prompts), "completions": list(completions), "completion_ids": list(completion_ids)}
    lists = [_ask(function, arguments, len(completions)) for function in functions]
    return list(zip(*lists, strict=True)) if lists else [() for _ in completions]


def _ask(function: RewardFunction, arguments: Mapping[str, Any], count: int) -> list[float | None]:
    name = reward_name(function)
    if missing := _missing_columns(function, arguments):
        have = ", ".join(sorted(arguments.keys() - {"completions", "completion_ids"}))
        raise UnusableReward(f"the reward {name!r} needs the column {missing[0]!r}, which the dataset does not have. It has: {have}.")
    try:
        result = function(**arguments)
        if inspect.isawaitable(result):
            result = asyncio.run(_wait(result))
    except Exception as error:
        raise RewardError(f"the reward {name!r} failed: {type(error).__name__}: {error}.") from error
    try:
        rewards = list(result)
    except TypeError:
        raise RewardError(f"the reward {name!r} returned a {type(result).__name__}, not a list.") from None
    if len(rewards) != count:
        raise RewardError(f"the reward {name!r} returned {len(rewards)} rewards for {count} completions.")
    return [_number(name, reward) for reward in rewards]


def _missing_columns(function: RewardFunction, arguments: Mapping[str, Any]) -> list[str]:
    """Return the parameters that a function needs but does not get. The list is empty if the signature is unknown."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [one.name for one in parameters if one.kind in by_name and one.default is one.empty and one.name not in arguments]


async def _wait(result: Any) -> Any:
    return await result


def _number(name: str, reward: Any) -> float | None:
    if reward is None:
        return None
    try:
        number = float(reward)
    except (TypeError, ValueError):
        raise RewardError(f"the reward {name!r} returned {reward!r}, which is not a number.") from None
    if not math.isfinite(number):
        raise RewardError(f"the reward {name!r} returned {number}; rewards must be finite or None.")
    if abs(number) > LARGEST_REWARD:
        raise RewardError(f"the reward {name!r} returned {number:g}; rewards must be from {-LARGEST_REWARD:g} to {LARGEST_REWARD:g}.")
    return number
