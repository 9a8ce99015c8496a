"""Users: they ask gateways, and say what they think of the answers: late, twice, changed, or about answers that are not theirs."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

from ...errors import DeltawireError
from ...gateway.http.api_keys import Caller
from ..fleet_simulation.oracle import Violation
from ..fleet_simulation.world import unexpected
from .live_oracle import Answer

if TYPE_CHECKING:
    from .gateway_model import GatewayModel
    from .live_world import LiveWorld

CALLERS = (Caller("app", feedback_on_all=False), Caller("web", feedback_on_all=False))
_STRANGER = Caller("stranger", feedback_on_all=False)
_TRIES = 6
_ANSWER_SECONDS = 60.0
"""A user who gets no answer to feedback for this long sends it again, perhaps to another gateway."""


@dataclass(slots=True)
class Users:
    """All users of a run.

    Parameters
    ----------
    world
        The run.
    random
        Draws what they do.
    """

    world: LiveWorld
    random: Random

    def ask(self) -> None:
        """Let a user ask something, if there is a gateway and an engine."""
        world, random = self.world, self.random
        gateways = [one for one in world.gateways if one.is_up]
        if not gateways:
            return
        gateway = random.choice(gateways)
        user = f"user{random.randrange(60)}"
        channel = gateway.watch.channel_of(user)
        engines = [one for one in world.followers if one.channel == channel and gateway.watch.rank(channel, one.serving) is not None]
        if not engines:
            return
        engine = random.choice(engines)
        caller = random.choice(CALLERS)
        intent = {
            "id": self.new_id(7),
            "time": gateway.clock(),
            "route": "chat",
            "model": "m",
            "train": random.random() < 0.85,
            "temperature": 1.0,
            "top_p": 1.0,
            "choices": 1,
            "episode": f"00000000-0000-4000-8000-{random.randrange(8) + 8 * int(world.kernel.now // 40):012x}"
            if random.random() < 0.7
            else None,
            "user": None,
            "channel": channel,
            "caller": caller.name,
            "tags": {},
            "engine": engine.name,
            "seq": engine.serving,
        }
        gateway.begins(intent)
        began, process = engine.serving, gateway.process
        world.kernel.later(4.0 * random.random(), self._answered, gateway, process, engine, intent, began, caller)

    def _answered(self, gateway: GatewayModel, process: Any, engine: Any, intent: dict[str, Any], began: int, caller: Caller) -> None:
        """The engine has drawn the last token. It may have swapped its weights in between."""
        random = self.random
        if engine.serving is None:  # it was killed
            return
        prompt = tuple(random.randrange(1000) for _ in range(2))
        tokens = tuple(random.randrange(1000) for _ in range(3))
        ended = engine.serving
        spans = ((0, 3, began),) if ended == began else ((0, 1, began), (1, 3, ended))
        answer = Answer(intent["id"], intent["train"], prompt, tokens, spans, intent["caller"], intent["episode"])
        self.world.live.answers[answer.id] = answer
        choice = {
            "token_ids": list(tokens),
            "logprobs": {"token_logprobs": [-0.5] * 3},
            "finish_reason": "stop",
            "weight_versions": [{"start": start, "end": end, "version": str(seq)} for start, end, seq in spans],
        }
        self.world.drawn[answer.id] = [{"prompt_token_ids": list(prompt), "changed_by": [], "choices": [choice]}]
        if gateway.process is not process or not gateway.is_up:
            return  # the user got no answer; the next session finds the intent
        gateway.records(intent)
        self._react(answer, caller, ended)

    def _react(self, answer: Answer, caller: Caller, seq: int) -> None:
        """Plan what the user says about an answer, and when."""
        random, later = self.random, self.world.kernel.later
        window = self.world.metrics[0].window
        if random.random() < 0.1:
            self._attack(answer)
        if random.random() > 0.85:
            return
        likes = random.random() < (0.03 if self.world.is_bad(seq) else 0.97)
        delay = window * (1.0 + random.random()) if random.random() < 0.1 else window * 0.8 * random.random() ** 2
        body = {"inference_id": answer.id, "metric_name": "thumbs", "value": likes, "feedback_id": self.new_id(4)}
        later(delay, self._say, body, caller, _TRIES)
        if random.random() < 0.15:
            later(delay + window * 0.3 * random.random(), self._say, dict(body), caller, _TRIES)
        if random.random() < 0.15:
            revised = {**body, "feedback_id": self.new_id(4), "revision": random.randrange(2), "value": random.random() < 0.5 or likes}
            later(delay * (0.5 + random.random()), self._say, revised, caller, _TRIES)
        if random.random() < 0.06:
            later(delay + window * 0.2 * random.random(), self._say, {**body, "value": not likes}, caller, 1)
        if answer.episode is not None and random.random() < 0.4:
            rating = {
                "episode_id": answer.episode,
                "metric_name": "rating",
                "value": round(random.random(), 3),
                "feedback_id": self.new_id(4),
            }
            later(delay, self._say, {**rating, "revision": random.randrange(3)}, caller, _TRIES)

    def _attack(self, answer: Answer) -> None:
        """Send what gateways must refuse, or what must not count."""
        random = self.random
        body: dict[str, Any] = {"inference_id": answer.id, "metric_name": "thumbs", "value": False, "feedback_id": self.new_id(4)}
        kind = random.randrange(4)
        if kind == 0:
            body["inference_id"] = self.new_id(7)
        elif kind == 1:
            body["value"] = random.choice(["x" * 5000, None, [1]])
        elif kind == 2:  # a gateway that knows no declaration yet stores these, and nobody trains on them
            body |= random.choice([{"metric_name": "rating"}, {"value": 7.5}, {"metric_name": "unknown"}])
        caller = _STRANGER if kind in (0, 3) else next(one for one in CALLERS if one.name == answer.caller)
        self._send(body, caller, 1, forged=kind != 2)

    def _say(self, body: dict[str, Any], caller: Caller, tries: int) -> None:
        self._send(body, caller, tries, forged=False)

    def _send(self, body: dict[str, Any], caller: Caller, tries: int, *, forged: bool) -> None:
        world = self.world
        gateways = [one for one in world.gateways if one.is_up]
        if not gateways:
            if tries > 1:
                world.kernel.later(15.0, self._say, body, caller, tries - 1)
            return
        state = {"answered": False}

        def ended(feedback: Any, error: BaseException | None) -> None:
            state["answered"] = True
            if error is None:
                if forged:
                    raise Violation(f"a gateway acknowledges {body}, which it must refuse.")
                world.live.acknowledges(feedback)
            elif not isinstance(error, DeltawireError):
                raise unexpected("a gateway", error if isinstance(error, Exception) else RuntimeError(repr(error)))
            else:
                world.live.counts[f"refused-{type(error).__name__}"] += 1
                if error.retryable or type(error).__name__ == "InteractionUnknown":
                    again(10.0)

        def again(seconds: float) -> None:
            if tries > 1 and not forged:
                world.kernel.later(seconds, self._say, body, caller, tries - 1)

        def give_up() -> None:
            if not state["answered"]:
                state["answered"] = True
                again(0.0)

        self.random.choice(gateways).receive(body, caller, ended)
        world.kernel.later(_ANSWER_SECONDS, give_up)

    def new_id(self, version: int) -> str:
        """Return a new UUID of this version."""
        number = self.random.getrandbits(128)
        text = f"{number:032x}"
        return f"{text[:8]}-{text[8:12]}-{version}{text[13:16]}-8{text[17:20]}-{text[20:]}"
