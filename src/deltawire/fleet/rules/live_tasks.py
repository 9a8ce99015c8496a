"""Live tasks: tasks of a round whose result comes from an interaction with a user, and not from a member (docs/protocol.md §13).

The trainer makes the result itself. A live task has one row, which names an interaction and holds its rewards. Everything here is a pure
function of the row and of the file that holds the interaction, so every trainer makes the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...format.content_hash import content_hash
from ...format.interactions import MAX_CHOICE, Interactions
from ...format.live_parts import INFERENCE_ID
from ...format.records.fleet_files import Row
from ...format.records.trainer_records import Round
from ...format.rollouts import Completion, Rollouts, sequences_of
from ...format.routing import Routing
from ...store.fleet_keys import FIRST_FREE_ATTEMPT
from ...store.live_keys import LiveKey, parse_interactions_key

LIVE_MEMBER = "live"
"""The name under which a trainer stores the results of live tasks. No member has it."""

LIVE_ATTEMPT = FIRST_FREE_ATTEMPT
"""The attempt of these results. It needs no lease."""

_FIELDS = {"live", "choice", "object", "index", "prompt_ids", "rewards"}
_MOST_REWARDS, _LONGEST_NAME, _LARGEST_TOKEN = 64, 200, 2**31 - 1


@dataclass(frozen=True, order=True, slots=True)
class LiveItem:
    """Names one completion of live traffic.

    Parameters
    ----------
    gateway
        The session of the gateway that recorded it.
    number
        The number of the file that holds it.
    index
        The index in the file.
    """

    gateway: str
    number: int
    index: int


@dataclass(frozen=True, slots=True)
class LiveRow:
    """The row of a live task.

    Parameters
    ----------
    id
        The id of the interaction.
    choice
        Which completion of the request it is.
    object
        The key of the file that holds it. The key contains the hash of the file.
    index
        The index in the file.
    prompt_ids
        The token ids of the prompt.
    rewards
        The reward that each metric gives: its value times its weight.
    """

    id: str
    choice: int
    object: str
    index: int
    prompt_ids: tuple[int, ...]
    rewards: Mapping[str, float]

    @property
    def key(self) -> LiveKey:
        """The parts of the key of the file."""
        key = parse_interactions_key(self.object)
        assert key is not None
        return key

    @property
    def item(self) -> LiveItem:
        """The name of the completion."""
        return LiveItem(self.key.gateway, self.key.number, self.index)

    def plain(self) -> dict[str, Any]:
        """Return the row as it stands in the file of tasks."""
        own = {"live": self.id, "choice": self.choice, "object": self.object, "index": self.index}
        return {**own, "prompt_ids": list(self.prompt_ids), "rewards": dict(self.rewards)}

    @classmethod
    def of(cls, row: Row) -> LiveRow | None:
        """Return the row if it is that of a live task, and None for every other row.

        Parameters
        ----------
        row
            A row of a task.
        """
        if row.keys() != _FIELDS:
            return None
        found = cls(row["live"], row["choice"], row["object"], row["index"], row["prompt_ids"], row["rewards"])
        is_named = isinstance(found.id, str) and INFERENCE_ID.fullmatch(found.id) is not None
        is_placed = isinstance(found.object, str) and parse_interactions_key(found.object) is not None
        if not (is_named and is_placed and _is_count(found.choice, MAX_CHOICE) and _is_count(found.index, _LARGEST_TOKEN)):
            return None
        ids: Any = found.prompt_ids
        if not isinstance(ids, list) or not ids or not all(_is_count(each, _LARGEST_TOKEN) for each in ids):
            return None
        rewards: Any = found.rewards
        if not isinstance(rewards, dict) or not 1 <= len(rewards) <= _MOST_REWARDS or not all(map(_is_reward, rewards.items())):
            return None
        return replace(found, prompt_ids=tuple(ids), rewards={name: float(value) for name, value in sorted(rewards.items())})


def live_rows(tasks: Sequence[Sequence[Row]]) -> dict[int, LiveRow]:
    """Return the rows of all live tasks of a round, by the number of the task.

    Parameters
    ----------
    tasks
        The rows of each task.
    """
    found = {number: LiveRow.of(rows[0]) for number, rows in enumerate(tasks) if len(rows) == 1}
    return {number: row for number, row in found.items() if row is not None}


def live_rollouts(row: LiveRow, file: Interactions, record: Round, task: int) -> Rollouts | None:
    """Return the result of a live task; None if the file does not hold what the row says, or if the user did not agree to training.

    Parameters
    ----------
    row
        The row of the task.
    file
        The file that the row names.
    record
        The round.
    task
        The number of the task.
    """
    if file.run != record.id or (file.gateway, file.number) != (row.key.gateway, row.key.number) or row.index >= len(file.interactions):
        return None
    about, made = file.interactions[row.index], file.rollouts.completions[row.index]
    prompt = file.rollouts.prompts[made.prompt]
    if (about.id, about.choice, about.train) != (row.id, row.choice, True) or prompt.tolist() != list(row.prompt_ids):
        return None
    completion = Completion(
        prompt=0,
        tokens=np.array(made.tokens),
        logprobs=np.array(made.logprobs),
        mask=np.array(made.mask),
        rewards=tuple(row.rewards.values()),
        spans=made.spans,
        finished=made.finished,
    )
    prompts = (np.array(prompt),)
    routing = None
    if file.rollouts.routing is not None:
        routing = Routing.encode(file.rollouts.routing.layout, sequences_of(prompts, [completion]), [made.experts])
    return Rollouts(
        run=record.id,
        round=record.round,
        task=task,
        attempt=LIVE_ATTEMPT,
        member=LIVE_MEMBER,
        nonce=content_hash(f"{record.id}/{record.round}/{task}".encode())[:32],
        prompts=prompts,
        completions=(completion,),
        reward_names=tuple(row.rewards),
        versions={span.seq: file.rollouts.versions[span.seq] for span in made.spans},
        routing=routing,
    )


def _is_count(value: Any, most: int) -> bool:
    return type(value) is int and 0 <= value <= most


def _is_reward(named: tuple[Any, Any]) -> bool:
    name, value = named
    return 1 <= len(name) <= _LONGEST_NAME and type(value) in (int, float) and math.isfinite(value)
