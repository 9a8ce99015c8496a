"""What the trainer accepts. Pure: a result is judged by what was read, and by nothing else.

A task's first valid result wins. Everything else is refused for one of these reasons:

    malformed      its bytes are not what its name says, break a rule, or do not fit the task
    wrong-run      it is of another run
    unleased       its member never held the lease that it was made under, or was not asked for a free attempt
    duplicate      its own attempt was accepted before
    late           another attempt was accepted before, or the step has been acknowledged
    future         it was made by a version that the chain does not have, or that its own step makes
    abandoned      it was made by a version that a rewind has abandoned
    wrong-digest   it was made by other weights than the chain has under that version
    stale          some of it was made by a version that is too old
    untrainable    training could not use it, or tried and failed
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from ...format.records.fleet_files import AcceptedResult
from ...format.records.member_records import Lease
from ...format.records.trainer_records import Round
from ...format.rollouts import Rollouts
from ...store.fleet_keys import FIRST_FREE_ATTEMPT, RolloutKey
from .staleness import KnownVersion, StalenessBudget

Reason: TypeAlias = Literal[
    "malformed", "wrong-run", "unleased", "duplicate", "late", "future", "abandoned", "wrong-digest", "stale", "untrainable"
]
REASONS: tuple[Reason, ...] = get_args(Reason)

_BYTES_OF_HEADER = 1 << 19
_BYTES_OF_TOKEN = 4 + 4 + 1 + 32
"""Its id, log-prob and mask, and a span of its own."""
_BYTES_OF_COMPLETION = 4 + 4 + 1 + 64 * (8 + 1)
"""Its length, its prompt, whether it is finished, and as many rewards as there may be."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a result is refused: the reason that is counted, and for people what exactly is wrong, if there is more to say."""

    reason: Reason
    why: str = ""


@dataclass(frozen=True, slots=True)
class Demand:
    """What a task asks for: its round, how many rows (and so prompts) it has, and how old versions may be.

    `prompt_ids` are the prompts' token ids, or None if nobody here can tell. `environment_tokens` is how many tokens a completion may have
    beside those that the policy drew.
    """

    round: Round
    prompts: int
    budget: StalenessBudget
    prompt_ids: Sequence[Sequence[int]] | None = None
    environment_tokens: int = 0


def most_bytes(demand: Demand) -> int | None:
    """Return how large a file of rollouts for this task can be at most, so that larger ones need not be read; None if nobody can tell."""
    if demand.prompt_ids is None:
        return None
    completions = demand.prompts * demand.round.samples
    tokens = completions * (demand.round.sampling.max_tokens + demand.environment_tokens)
    prompts = sum(len(prompt) for prompt in demand.prompt_ids)
    return _BYTES_OF_HEADER + prompts * 4 + demand.prompts * 4 + tokens * _BYTES_OF_TOKEN + completions * _BYTES_OF_COMPLETION


def judge_key(place: RolloutKey, accepted: AcceptedResult | None, *, closed: bool) -> Reason | None:
    """What the name of a result says already, so that it need not be read; None if it must be."""
    if accepted is not None:
        return "duplicate" if accepted.attempt == place.attempt else "late"
    return "late" if closed else None


def judge_origin(rollouts: Rollouts, place: RolloutKey, lease: Lease | None, run: str, *, is_free: bool = False) -> Reason | None:
    """Judge whether a result is of this run, lies where it says, and comes from the member that held the lease.

    `is_free`: the attempt needs no lease, and the trainer asked this member for it.
    """
    if rollouts.run != run:
        return "wrong-run"
    if (rollouts.round, rollouts.task, rollouts.attempt) != place[:3]:
        return "malformed"
    if is_free:
        return None
    if place.attempt >= FIRST_FREE_ATTEMPT:
        return "unleased"
    if lease is None or lease.id != run or lease.member != rollouts.member or lease.nonce != rollouts.nonce:
        return "unleased"
    return None


def judge_content(rollouts: Rollouts, demand: Demand) -> Refusal | None:
    """Judge whether it is what the task asks for: its prompts, each completed as often as was asked, by as many tokens as are allowed."""
    if len(rollouts.prompts) != demand.prompts:
        return Refusal("malformed", f"it has {len(rollouts.prompts)} prompts, and the task {demand.prompts}")
    if demand.prompt_ids is not None:
        for number, (found, expected) in enumerate(zip(rollouts.prompts, demand.prompt_ids, strict=True)):
            if found.tolist() != list(expected):
                return Refusal("malformed", f"prompt {number} is not the task's, by the trainer's tokenizer")
    counts = [0] * demand.prompts
    most = demand.round.sampling.max_tokens
    for completion in rollouts.completions:
        counts[completion.prompt] += 1
        if int(completion.mask.sum()) > most:
            return Refusal("malformed", f"a completion has more than {most:,} tokens of the policy's own")
        if len(completion.tokens) > most + demand.environment_tokens:
            return Refusal(
                "malformed", f"a completion has {len(completion.tokens):,} tokens; {most + demand.environment_tokens:,} are allowed"
            )
    if counts != [demand.round.samples] * demand.prompts:
        return Refusal("malformed", f"not every prompt has {demand.round.samples} completions")
    return None


def judge_versions(rollouts: Rollouts, demand: Demand, versions: Mapping[int, KnownVersion | None]) -> Reason | None:
    """Whether the versions that made it are of the chain as it stands, and young enough. `versions` holds all that it names."""
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
