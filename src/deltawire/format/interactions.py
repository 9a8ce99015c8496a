"""A file of interactions: requests that one gateway answered (docs/protocol.md §13).

    live/interactions/{gateway session}/{number:020}-{blake3}.bin

    8 bytes   the length of the record, little-endian
    record    canonical JSON: for each completion its id, episode, user, channel, consent, … (below)
    rollouts  a file of rollouts (rollouts.py): prompts, tokens, log-probs, token spans, routed experts; without rewards

Entry i of the record describes completion i of the rollouts. So everything that training uses has the strict parser of rollouts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import CorruptInteractions, CorruptRecord, CorruptRollouts, LimitExceeded
from .live_parts import (
    ANY_ID,
    GATEWAY_SESSION,
    INFERENCE_ID,
    read_bounded,
    read_flag,
    read_tags,
    read_time,
)
from .records.canonical import Fields, dump
from .records.fleet_parts import AttemptId, read_number
from .records.record_parts import HASH, NONCE, READER
from .rollouts import RolloutLimits, Rollouts

MAX_INTERACTIONS = 4096
"""The most interactions in one file."""
MAX_INTERACTIONS_BYTES = 64 << 20
"""The size of the largest file of interactions."""
MAX_INTERACTIONS_RECORD = 16 << 20
MAX_MODEL_NAME, MAX_WORD, MAX_CHOICE = 200, 32, 127
MAX_MESSAGES, MAX_TEXT = 1024, 256 << 10
"""The most messages of a conversation that is kept as text, and the most characters of all of it with its answer."""
MAX_COUNT = 10**9
LIMITS = RolloutLimits(file_bytes=MAX_INTERACTIONS_BYTES, prompts=MAX_INTERACTIONS, completions=MAX_INTERACTIONS)
_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation.

    Parameters
    ----------
    role
        "user", "assistant", "system", "tool", ….
    content
        The text of the message, after redaction.
    """

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class ConversationText:
    """The text of an interaction, after redaction.

    Parameters
    ----------
    messages
        The conversation up to the answer. A plain completion has one message of the user.
    answer
        The answer.
    """

    messages: tuple[Message, ...]
    answer: str


@dataclass(frozen=True, slots=True)
class AnswerFacts:
    """Facts about an answer that monitors compare between channels.

    Parameters
    ----------
    length
        The length of the answer in tokens.
    refusal
        Whether the answer is a refusal.
    tool_calls
        The number of tool calls that are valid.
    bad_tool_calls
        The number of tool calls that are not valid.
    has_text
        Whether the gateway had the text of the answer. If not, the facts except the length are not known.
    """

    length: int
    refusal: bool = False
    tool_calls: int = 0
    bad_tool_calls: int = 0
    has_text: bool = True

    def plain(self) -> dict[str, Any]:
        """Return the facts as JSON values."""
        if not self.has_text:
            return {"length": self.length}
        counts = {"length": self.length, "tool_calls": self.tool_calls, "bad_tool_calls": self.bad_tool_calls}
        return {"refusal": int(self.refusal), **counts}

    @classmethod
    def of(cls, fields: Fields) -> AnswerFacts:
        """Return the facts that an object in a record describes.

        Parameters
        ----------
        fields
            The fields of the object.
        """
        if not fields.has("refusal"):
            length = fields.integer("length")
            fields.done()
            if length > MAX_COUNT:
                fields.refuse(f"a count is above {MAX_COUNT:,}")
            return cls(length, has_text=False)
        counts = [fields.integer(name) for name in ("length", "tool_calls", "bad_tool_calls")]
        refusal = read_flag(fields, "refusal")
        fields.done()
        if max(counts) > MAX_COUNT:
            fields.refuse(f"a count is above {MAX_COUNT:,}")
        return cls(counts[0], refusal, counts[1], counts[2])


@dataclass(frozen=True, slots=True)
class Interaction:
    """The facts that a gateway knows about one completion, besides its tokens.

    Parameters
    ----------
    id
        The id of the interaction, which the caller got with the answer. See `new_inference_id`.
    time
        The gateway's clock when the answer was complete, in milliseconds. It decides nothing.
    route
        The route of the request: "chat", "completions" or "responses".
    model
        The name of the model that the caller asked for.
    finish
        Why the answer ended, for example "stop", "length" or "tool_calls".
    train
        Whether the user agrees that the answer is trained on.
    temperature
        The sampling temperature. Log-probs are those of the distribution that it gives.
    top_p
        The answer was drawn from the most probable tokens whose probabilities sum to this.
    facts
        Facts for monitors.
    episode
        The id of the episode, a UUID; None if there is none.
    choice
        The index of this completion among those of its request. The completions of a request have the same id.
    user
        A keyed hash of the user, 64 hexadecimal digits; None if the user is not known. It is never the user's name.
    channel
        The channel whose version answered; None if there are no channels.
    caller
        The name of the caller's API key; None if there are no keys.
    tags
        Short texts by short names.
    text
        The conversation and the answer as text, after redaction; None if they are not kept.
    diverted_from
        The channel of the user, if no engine of it could answer, so that one of another channel did. None if the user's channel answered.
    """

    id: str
    time: int
    route: str
    model: str
    finish: str
    train: bool
    temperature: float
    top_p: float
    facts: AnswerFacts
    episode: str | None = None
    choice: int = 0
    user: str | None = None
    channel: str | None = None
    caller: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    text: ConversationText | None = None
    diverted_from: str | None = None

    def plain(self) -> dict[str, Any]:
        """Return the interaction as JSON values."""
        own = {name: getattr(self, name) for name in ("id", "time", "route", "model", "finish", "episode", "choice", "user", "channel")}
        drawn = {"temperature": repr(float(self.temperature)), "top_p": repr(float(self.top_p))}
        text = None
        if self.text is not None:
            text = {"messages": [[one.role, one.content] for one in self.text.messages], "answer": self.text.answer}
        rest = {"train": int(self.train), "facts": self.facts.plain(), "caller": self.caller, "tags": dict(self.tags), "text": text}
        diverted = {} if self.diverted_from is None else {"diverted_from": self.diverted_from}
        return {**own, **drawn, **rest, **diverted}

    @classmethod
    def of(cls, fields: Fields) -> Interaction:
        """Return the interaction that an object in a record describes.

        Parameters
        ----------
        fields
            The fields of the object.
        """
        found = cls(
            id=fields.matching("id", INFERENCE_ID),
            time=read_time(fields),
            route=read_bounded(fields, "route", MAX_WORD),
            model=read_bounded(fields, "model", MAX_MODEL_NAME),
            finish=read_bounded(fields, "finish", MAX_WORD),
            train=read_flag(fields, "train"),
            temperature=read_number(fields, "temperature"),
            top_p=read_number(fields, "top_p"),
            facts=AnswerFacts.of(fields.object("facts")),
            episode=fields.nullable("episode", lambda name: fields.matching(name, ANY_ID)),
            choice=fields.integer("choice"),
            user=fields.nullable("user", lambda name: fields.matching(name, HASH)),
            channel=fields.nullable("channel", lambda name: fields.matching(name, READER)),
            caller=fields.nullable("caller", lambda name: fields.matching(name, READER)),
            tags=read_tags(fields),
            text=fields.nullable("text", lambda name: _read_text(fields.object(name))),
            diverted_from=fields.matching("diverted_from", READER) if fields.has("diverted_from") else None,
        )
        fields.done()
        if found.choice > MAX_CHOICE or found.temperature < 0 or not 0 < found.top_p <= 1:
            fields.refuse(f"choice is at most {MAX_CHOICE}, temperature at least 0, top_p in (0, 1]")
        if found.diverted_from is not None and found.diverted_from == found.channel:
            fields.refuse("diverted_from is another channel than channel")
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Interactions:
    """Some requests that one session of a gateway answered.

    Parameters
    ----------
    number
        The number of the file. The files of a session are numbered from 0 without gaps.
    interactions
        What is known about each completion of `rollouts`, in the same order.
    rollouts
        The tokens. Its member is the session of the gateway; its round, task and attempt are 0; it has no rewards.
    """

    number: int
    interactions: tuple[Interaction, ...]
    rollouts: Rollouts

    @property
    def run(self) -> str:
        """The id of the run."""
        return self.rollouts.run

    @property
    def gateway(self) -> str:
        """The session of the gateway: its name, a dot, and 16 hexadecimal digits."""
        return self.rollouts.member

    def to_bytes(self) -> bytes:
        """Return the file. Raises `CorruptInteractions` or `CorruptRollouts` if `parse` would refuse it, or `LimitExceeded`."""
        own = {"run": self.run, "gateway": self.gateway, "number": self.number}
        try:
            listed = [one.plain() for one in self.interactions]
            record = dump({"deltawire": "interactions", "version": _version(self.interactions), **own, "interactions": listed})
        except (TypeError, ValueError) as error:
            raise CorruptInteractions(f"these interactions cannot be written ({error}).") from None
        data = b"".join([len(record).to_bytes(_LENGTH_BYTES, "little"), record, self.rollouts.to_bytes()])
        for what, size, most in (("record", len(record), MAX_INTERACTIONS_RECORD), ("file", len(data), MAX_INTERACTIONS_BYTES)):
            if size > most:
                raise LimitExceeded(f"a {what} of interactions has {size:,} bytes; {most:,} are allowed.")
        self.parse(data)
        return data

    @classmethod
    def parse(cls, data: bytes) -> Interactions:
        """Return the interactions in a file.

        Raises `CorruptInteractions` for anything that no gateway writes, and `UnsupportedVersion` for a later format. It needs memory for
        about three times the file and its record, whatever the file says.

        Parameters
        ----------
        data
            The bytes of the file.
        """
        try:
            return cls._parse(data)
        except (CorruptRecord, CorruptRollouts) as error:
            raise CorruptInteractions(f"a file of interactions cannot be read: {error.message}") from None

    @classmethod
    def _parse(cls, data: bytes) -> Interactions:
        length = int.from_bytes(data[:_LENGTH_BYTES], "little")
        if not _LENGTH_BYTES + length < len(data) <= MAX_INTERACTIONS_BYTES:
            raise CorruptRecord(f"it has {len(data):,} bytes, and says that its record has {length:,}.")
        fields = Fields.parse(data[_LENGTH_BYTES : _LENGTH_BYTES + length], "interactions", limit=MAX_INTERACTIONS_RECORD, versions=(1, 2))
        run, gateway, number = fields.matching("run", NONCE), fields.matching("gateway", GATEWAY_SESSION), fields.integer("number")
        listed = fields.objects("interactions")
        if not 1 <= len(listed) <= MAX_INTERACTIONS:
            fields.refuse(f"it lists {len(listed):,} interactions instead of 1 to {MAX_INTERACTIONS:,}")
        found = tuple(Interaction.of(inner) for inner in listed)
        fields.done()
        if fields.version != _version(found):
            fields.refuse("version 2 is for interactions of which one has diverted_from, or facts without a text")
        if len({(one.id, one.choice) for one in found}) != len(found):
            fields.refuse("an interaction occurs twice")
        rollouts = Rollouts.parse(data[_LENGTH_BYTES + length :], LIMITS)
        if (rollouts.run, rollouts.member, len(rollouts.completions)) != (run, gateway, len(found)):
            fields.refuse("its rollouts are of another run or gateway, or are not as many")
        attempt = AttemptId(rollouts.round, rollouts.task, rollouts.attempt)
        if attempt != (0, 0, 0) or rollouts.reward_names:
            fields.refuse("its rollouts have a task or rewards")
        return cls(number, found, rollouts)


def _version(interactions: Sequence[Interaction]) -> int:
    """Return the version of a record with these interactions: 1 whenever a reader of version 1 can read it."""
    return 1 if all(one.diverted_from is None and one.facts.has_text for one in interactions) else 2


def _read_text(fields: Fields) -> ConversationText:
    messages, characters = [], 0
    for value in fields.items("messages"):
        if not isinstance(value, list) or [type(part) for part in value] != [str, str]:
            fields.refuse("a message is [role, content]")
        one = Fields({"role": value[0], "content": value[1]}, "interactions.message")
        messages.append(Message(read_bounded(one, "role", MAX_WORD), one.text("content")))
        characters += len(messages[-1].content)
    answer = fields.text("answer")
    fields.done()
    if not 1 <= len(messages) <= MAX_MESSAGES or characters + len(answer) > MAX_TEXT:
        fields.refuse(f"a text has 1 to {MAX_MESSAGES:,} messages, and at most {MAX_TEXT:,} characters")
    return ConversationText(tuple(messages), answer)
