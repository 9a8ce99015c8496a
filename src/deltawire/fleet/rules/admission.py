"""Decides which results the trainer accepts. A result is judged only by what was read.

The first valid result of a task is accepted. Every other result is refused for one of these reasons:

    malformed      its bytes do not have the hash in its name, break a rule, or do not fit the task
    wrong-run      it is of another run
    unleased       its member did not hold the lease that it was made under, or was not asked for a free attempt
    duplicate      a result of the same attempt was accepted before
    late           a result of another attempt was accepted before, or the step has been acknowledged
    future         it was made by a version that the chain does not have, or by the version of its own training step or a later one
    abandoned      it was made by a version that a rewind has abandoned
    wrong-digest   it was made by other weights than the chain has under that version
    stale          some of its tokens were made by a version that is too old
    untrainable    training could not use it, or training on it failed
    excluded       the trainer has excluded its member
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from ...format.records.fleet_files import AcceptedResult
from ...format.records.member_records import Lease
from ...format.records.trainer_records import Round
from ...format.rollouts import Rollouts
from ...format.routing import RoutingLayout, most_routing_bytes
from ...store.fleet_keys import FIRST_FREE_ATTEMPT, RolloutKey
from .live_tasks import LIVE_MEMBER
from .staleness import KnownVersion, StalenessBudget

Reason: TypeAlias = Literal[
    "malformed", "wrong-run", "unleased", "duplicate", "late", "future", "abandoned", "wrong-digest", "stale", "untrainable", "excluded"
]
REASONS: tuple[Reason, ...] = get_args(Reason)

_BYTES_PER_HEADER = 1 << 19
_BYTES_PER_TOKEN = 4 + 4 + 1 + 32
"""Its id, log-prob and mask, and a token span for it alone."""
_BYTES_PER_COMPLETION = 4 + 4 + 1 + 64 * (8 + 1)
"""Its length, its prompt, whether it is finished, and the largest number of rewards."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a result is refused: the reason that is counted, and a text for people that says what exactly is wrong."""

    reason: Reason
    why: str = ""


@dataclass(frozen=True, slots=True)
class Demand:
    """The demands of a task.

    Parameters
    ----------
    round
        The round of the task.
    prompts
        How many rows, and so prompts, the task has.
    budget
        How old versions may be.
    prompt_ids
        The token ids of the prompts; None if the trainer has no tokenizer.
    environment_tokens
        How many tokens that the policy did not draw a completion may have.
    routers
        The routers of the trainer's model; None if it has none, or they are not known.
    is_live
        Whether it is a live task, whose prompt has one completion.
    """

    round: Round
    prompts: int
    budget: StalenessBudget
    prompt_ids: Sequence[Sequence[int]] | None = None
    environment_tokens: int = 0
    routers: RoutingLayout | None = None
    is_live: bool = False

    @property
    def samples(self) -> int:
        """The number of completions of each prompt."""
        return 1 if self.is_live else self.round.samples


def most_bytes(demand: Demand) -> int | None:
    """Return the largest size of a result for this task, so that larger ones need not be read; None if it is unknown."""
    if demand.prompt_ids is None:
        return None
    completions = demand.prompts * demand.samples
    tokens = completions * (demand.round.sampling.max_tokens + demand.environment_tokens)
    prompts = sum(len(prompt) for prompt in demand.prompt_ids)
    routing = 0 if demand.routers is None else most_routing_bytes(demand.routers, tokens + prompts * demand.samples, completions)
    return _BYTES_PER_HEADER + prompts * 4 + demand.prompts * 4 + tokens * _BYTES_PER_TOKEN + completions * _BYTES_PER_COMPLETION + routing


def judge_key(key: RolloutKey, accepted: AcceptedResult | None, *, closed: bool) -> Reason | None:
    """Judge a result by its key alone. Return None if the result must be read.

    `accepted` is the accepted result of the task, if there is one; `closed` says that the round accepts no more results.
    """
    if accepted is not None:
        return "duplicate" if accepted.attempt == key.attempt else "late"
    return "late" if closed else None


def judge_origin(rollouts: Rollouts, key: RolloutKey, lease: Lease | None, run: str, *, is_free: bool = False) -> Reason | None:
    """Judge whether a result is of this run, is what its key says, and comes from the member that held the lease.

    `is_free` says that the attempt needs no lease, and that the trainer asked this member for it.
    """
    if rollouts.run != run:
        return "wrong-run"
    if rollouts.member == LIVE_MEMBER:  # only the trainer makes such results, and it does not judge their origin
        return "unleased"
    if (rollouts.round, rollouts.task, rollouts.attempt) != key.attempt_id:
        return "malformed"
    if is_free:
        return None
    if key.attempt >= FIRST_FREE_ATTEMPT:
        return "unleased"
    if lease is None or lease.id != run or lease.member != rollouts.member or lease.nonce != rollouts.nonce:
        return "unleased"
    return None


def judge_content(rollouts: Rollouts, demand: Demand) -> Refusal | None:
    """Judge whether a result has the prompts of its task, the right number of completions, and no more tokens than are allowed."""
    if len(rollouts.prompts) != demand.prompts:
        return Refusal("malformed", f"it has {len(rollouts.prompts)} prompts, and the task has {demand.prompts}")
    if demand.prompt_ids is not None:
        for number, (found, expected) in enumerate(zip(rollouts.prompts, demand.prompt_ids, strict=True)):
            if found.tolist() != list(expected):
                return Refusal("malformed", f"prompt {number} is not the task's, by the trainer's tokenizer")
    counts = [0] * demand.prompts
    most = demand.round.sampling.max_tokens
    for completion in rollouts.completions:
        counts[completion.prompt] += 1
        if int(completion.mask.sum()) > most:
            return Refusal("malformed", f"the policy drew more than {most:,} tokens of a completion")
        if len(completion.tokens) > most + demand.environment_tokens:
            return Refusal(
                "malformed", f"a completion has {len(completion.tokens):,} tokens; {most + demand.environment_tokens:,} are allowed"
            )
    if counts != [demand.samples] * demand.prompts:
        return Refusal("malformed", f"not every prompt has {demand.samples} completions")
    return None


def judge_versions(rollouts: Rollouts, demand: Demand, versions: Mapping[int, KnownVersion | None]) -> Reason | None:
    """Judge whether the versions that made a result are in the chain's history, and new enough.

    `versions` holds every version that the result names, as the chain has it; None for one that the chain does not have.
    """
    found = [(versions[seq], claimed) for seq, claimed in rollouts.versions.items()]
    for version, claimed in found:
        if version is None:
            return "future"
        if (version.digest, version.step) != (claimed.digest, claimed.step):
            return "wrong-digest"
    if not all(version is not None and version.live for version, _ in found):
        return "abandoned"
    step = demand.round.for_step
    if any(version is not None and version.step >= step for version, _ in found):
        return "future"
    admitted = all(
        version is not None and version.step >= demand.round.oldest_step and demand.budget.admits(step, version.step)
        for version, _ in found
    )
    return None if admitted else "stale"
