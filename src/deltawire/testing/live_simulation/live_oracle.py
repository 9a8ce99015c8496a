"""Judges what trainers learn from live traffic. The judge follows docs/protocol.md §13, and uses none of the code that it judges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...format.feedback import Feedback
from ...format.records.fleet_files import AcceptedResult, Tasks
from ...format.records.trainer_records import Round
from ...format.rollouts import Rollouts
from ...store import fleet_keys
from ..fleet_simulation.oracle import Acknowledged, History, Oracle, Violation
from .users import LONG_WINDOW, WINDOW, Answer, Reaction, Traffic

if TYPE_CHECKING:
    from collections.abc import Iterable

_LIVE = "live"


class LiveOracle(Oracle):
    """The judge of fleets, which also judges live tasks. Set `traffic` before anything is trained."""

    traffic: Traffic
    trained = 0
    """The number of interactions that were trained on, in all lines of history."""

    def trains(self, history: History, epoch: int, step: int, rollouts: Sequence[Rollouts]) -> None:
        """Judge what a trainer is about to train on, and remember its interactions in its line of history."""
        super().trains(history, epoch, step, rollouts)
        number = self.acknowledged[epoch, step].round
        record = Round.parse(self._read(fleet_keys.round_key(number)))
        rows = Tasks.parse(self._read(record.rows.key)).rows
        for one in rollouts:
            if one.member != _LIVE:
                continue
            row = rows[one.task][0]
            answer = self._judge_interaction(one, row, f"step {step} of epoch {epoch}")
            identity = (-1, int(answer.id[-12:], 16))
            if identity in history.trained:
                raise Violation(f"step {step} of epoch {epoch} trains on {answer.id}, as step {history.trained[identity]} did.")
            history.trained[identity] = step
            self.trained += 1

    def _judge(self, rollouts: Rollouts, result: AcceptedResult, ack: Acknowledged, what: str, *, replaced: bool) -> None:
        if result.member != _LIVE:
            super()._judge(rollouts, result, ack, what, replaced=replaced)
            return
        for seq, claimed in rollouts.versions.items():
            version = self._chain.find(seq)
            if version is None or (version.digest, version.step) != (claimed.digest, claimed.step):
                raise Violation(f"{what} trains on an interaction of a version that the chain does not have.")
            if not self._is_within_budget(ack.step, version.step) or not (version.live or replaced):
                raise Violation(f"{what} trains on an interaction of a version that is too old, or was abandoned.")

    def _judge_interaction(self, one: Rollouts, row: Any, what: str) -> Answer:
        answer = self.traffic.answers.get(row["live"])
        if answer is None:
            raise Violation(f"{what} trains on {row['live']}, which no user ever got.")
        if not answer.train:
            raise Violation(f"{what} trains on {answer.id} without consent.")
        [completion] = one.completions
        if completion.tokens.tolist() != [answer.token, 5] or set(one.versions) != {answer.version.seq}:
            raise Violation(f"{what} trains on {answer.id} with the tokens or the version of another answer.")
        given = dict(zip(one.reward_names, completion.rewards, strict=True))
        expected = self._rewards(answer)
        if given != expected:
            raise Violation(f"{what} trains on {answer.id} with the rewards {given} instead of {expected}.")
        return answer

    def _rewards(self, answer: Answer) -> dict[str, float]:
        """Return the rewards of an answer, as the rules read."""
        first: dict[tuple[str | None, str], Reaction] = {}
        useful = [one for one in self.traffic.reactions if _is_useful(one.feedback)]
        for reaction in sorted(useful, key=lambda one: (one.stored, one.key)):
            first.setdefault((reaction.feedback.caller, reaction.feedback.id), reaction)
        thumbs, ratings = [], []
        for reaction in first.values():
            said = reaction.feedback
            if said.caller is not None and said.caller != answer.caller:
                continue
            late = reaction.stored - answer.stored
            order = (said.revision, reaction.stored, reaction.key)
            if said.metric == "thumbs" and said.inference == answer.id and late <= WINDOW:
                thumbs.append((order, 1.0 if said.value else 0.0))
            same = answer.episode is not None and said.episode == answer.episode
            if said.metric == "rating" and same and type(said.value) is float and late <= LONG_WINDOW:
                ratings.append((order, said.value * 0.25))
        return {"thumbs": _last(thumbs, 0.5)} | ({"rating": _last(ratings, 0.0)} if ratings else {})

    def _read(self, key: str) -> bytes:
        data = self._objects.read(key)
        if data is None:
            raise Violation(f"{key} is missing while it is needed.")
        return data


def _is_useful(said: Feedback) -> bool:
    """Tell whether a metric can have this value at all. Other feedback counts for nothing, whatever its id."""
    if said.metric == "thumbs":
        return said.inference is not None and type(said.value) is bool
    return said.metric == "rating" and said.episode is not None and type(said.value) is float and said.value <= 4.0


def _last(values: Iterable[tuple[tuple[int, float, str], float]], default: float) -> float:
    return max(values, default=((0, 0.0, ""), default))[1]
