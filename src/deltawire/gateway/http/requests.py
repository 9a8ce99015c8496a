"""The parts of a request that the gateway reads: the id that its answer gets, who sent it, and whether it is recorded."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from ...engines.sampling_changes import number_of
from ...errors import RequestMalformed
from ...format.interactions import MAX_CHOICE
from ...format.live_parts import ANY_ID, MAX_TAG_NAME, MAX_TAG_VALUE, MAX_TAGS, new_inference_id
from .api_keys import Caller
from .bodies import Headers, dump
from .memory import MemoryBudget, Reservation, json_memory

ID_HEADER, EPISODE_HEADER = "x-deltawire-inference-id", "x-deltawire-episode-id"
VERSION_HEADER, CHANNEL_HEADER = "x-deltawire-version", "x-deltawire-channel"
USER_HEADER, CONSENT_HEADER, TAGS_HEADER = "x-deltawire-user", "x-deltawire-consent", "x-deltawire-tags"
ROUTES = {"/v1/chat/completions": "chat", "/v1/completions": "completions", "/v1/responses": "responses"}
_PREFIXES = {"chat": "chatcmpl-", "completions": "cmpl-", "responses": "resp_"}
_MOST_USER = 512


@dataclass(slots=True)
class AskedFor:
    """A request to an engine.

    Parameters
    ----------
    route
        "chat", "completions" or "responses".
    body
        Its JSON object.
    id
        The id of the interaction.
    episode
        The id of the episode. None if the request names none.
    user
        The name that the caller gives the user who asks. None if it gives none.
    caller
        The owner of the API key.
    train
        Whether the answer may be trained on.
    tags
        The tags that the caller gave.
    time
        When it came, in milliseconds since 1970.
    memory
        The memory that the request, its answer and its recording take.
    channel
        The channel that the user belongs to, when it is known. An engine of the main channel may answer instead.
    """

    route: str
    body: dict[str, Any]
    caller: Caller
    episode: str | None
    user: str | None
    train: bool
    tags: dict[str, str] = field(default_factory=dict)
    time: int = field(default_factory=lambda: time.time_ns() // 1_000_000)
    id: str = ""
    memory: Reservation = field(default_factory=lambda: MemoryBudget().reservation())
    channel: str | None = None

    def __post_init__(self) -> None:
        self.id = new_inference_id(self.time)

    @property
    def user_of_caller(self) -> str | None:
        """The name of the user, and of the caller if there are keys: two callers may call two users the same. None without a user."""
        owner = "" if self.caller.name is None else f"{self.caller.name}\0"
        return None if self.user is None else owner + self.user

    @property
    def choices(self) -> int:
        """The number of completions for each prompt. `read_request` has checked it."""
        return self.body.get("n") or 1

    @property
    def model(self) -> str:
        model = self.body.get("model")
        return model[:200] if isinstance(model, str) and model else "-"

    def number(self, name: str, default: float = 1.0) -> float:
        """Return a parameter of the sampling, or its default if the request has no number there that can be recorded."""
        found = number_of(self.body.get(name))
        return default if found is None else found

    @property
    def answer_id(self) -> str:
        """The id that the body of the answer has: the id of the interaction after the prefix of its route."""
        return _PREFIXES[self.route] + self.id


def read_request(
    route: str, body: dict[str, Any], headers: Headers, caller: Caller, *, consent: bool, memory: Reservation | None = None
) -> AskedFor:
    """Read a request. Raises `RequestMalformed` if a header, or the number of choices, cannot be used."""
    asked = AskedFor(
        route=route,
        body=body,
        caller=caller,
        episode=_episode(headers.get(EPISODE_HEADER)),
        user=_user(headers, body),
        train=_consent(headers.get(CONSENT_HEADER), consent),
        tags=read_tags(headers.get(TAGS_HEADER)),
    )
    if memory is not None:
        asked.memory = memory
    n = body.get("n")
    if n is not None and (type(n) is not int or not 1 <= n <= MAX_CHOICE + 1):  # engines read "2" and 2.0 as 2
        raise RequestMalformed(f"n must be a whole number from 1 to {MAX_CHOICE + 1}.")
    return asked


def read_tags(text: str | None) -> dict[str, str]:
    """Read the header with tags: a JSON object of texts."""
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    return check_tags(found, f"the header {TAGS_HEADER}")


def check_tags(found: Any, what: str) -> dict[str, str]:
    """Return tags that a caller gave. Raises `RequestMalformed` if there are too many, or if they are too long."""
    fits = isinstance(found, Mapping) and len(found) <= MAX_TAGS
    fits = fits and all(type(name) is str and type(value) is str for name, value in found.items())
    fits = fits and all(1 <= len(name) <= MAX_TAG_NAME and len(value) <= MAX_TAG_VALUE for name, value in found.items())
    if not fits or not all((name + value).isprintable() for name, value in found.items()):
        raise RequestMalformed(
            f"{what} must be an object of at most {MAX_TAGS} printable texts, with names of at most {MAX_TAG_NAME} characters and values "
            f"of at most {MAX_TAG_VALUE}."
        )
    return dict(found)


def read_id(text: Any, what: str) -> str:
    """Return an id of an interaction, episode or feedback. The `id` of an answer is accepted too, with the prefix of its route."""
    if isinstance(text, str) and len(text) <= 64:
        bare = text
        for prefix in _PREFIXES.values():
            bare = bare.removeprefix(prefix)
        try:
            found = str(UUID(bare))
        except ValueError:
            found = ""
        if ANY_ID.fullmatch(found):
            return found
    raise RequestMalformed(f"{what} is not a UUID: {str(text)[:80]!r}.")


def _episode(text: str | None) -> str | None:
    return None if text is None else read_id(text, f"the header {EPISODE_HEADER}")


def _consent(text: str | None, default: bool) -> bool:
    if text is None:
        return default
    if text.strip().lower() not in ("yes", "no"):
        raise RequestMalformed(f"the header {CONSENT_HEADER} is {text[:40]!r} instead of yes or no.")
    return text.strip().lower() == "yes"


def _user(headers: Headers, body: Mapping[str, Any]) -> str | None:
    """Return who asks: the header, or what OpenAI's clients call `safety_identifier` and `user`.

    The owner of the key is not the user: an application has one key for all of its users.
    """
    for found in (headers.get(USER_HEADER), body.get("safety_identifier"), body.get("user")):
        if isinstance(found, str) and found:
            if len(found) > _MOST_USER:
                raise RequestMalformed(f"the name of the user has more than {_MOST_USER} characters.")
            if any(0xD800 <= ord(each) < 0xE000 for each in found):
                raise RequestMalformed("the name of the user has half of a surrogate pair, which is no character.")
            return found
    return None


def with_own_fields(asked: AskedFor, raw: bytes, *, inline: bool) -> bytes:
    """Return the body for an engine. It is the caller's own, except where the gateway needs to say or to ask something.

    Raises `GatewayFull` if a body of its own does not fit into the memory.

    Parameters
    ----------
    asked
        The request.
    raw
        The caller's body.
    inline
        Whether the answer itself must contain token ids and log-probs, because the engine keeps no answers.
    """
    own: dict[str, Any] = {}
    if asked.route == "responses":
        own["request_id"] = asked.answer_id  # vLLM uses it as the id of the response, which later requests may refer to
    if inline and asked.route == "chat":
        own |= {"logprobs": True, "return_token_ids": True}
    elif inline and asked.route == "completions":
        own |= {"logprobs": asked.body.get("logprobs") or 0, "return_token_ids": True}
    if raw and not own:
        return raw
    asked.memory.add(json_memory(raw))
    return dump({**asked.body, **own})
