"""The options of a gateway."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from ..engines.http_session import check_server_url
from ..format.live_parts import GATEWAY_NAME
from ..format.records.record_parts import READER
from .http.origins import check_origin

Redact: TypeAlias = Callable[[Mapping[str, Any]], Mapping[str, Any] | None]
"""Called with what would be recorded of an answer: "messages", "answer", "tags", "route", "model".

It returns what may be recorded, with "train": False if the answer must not be trained on. None records nothing. If it returns other
messages or another answer, or does not see all of the text, the tokens are recorded only if it returns "tokens": True."""


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """The address of an engine, and the channel that it follows.

    Parameters
    ----------
    url
        The address of its server.
    channel
        The channel that it follows. None if it follows the chain itself.
    """

    url: str
    channel: str | None = None

    def __post_init__(self) -> None:
        base = self.url.rstrip("/")
        if base.endswith("/v1"):
            raise ValueError(f"the gateway adds /v1 to {self.url!r} itself; write {base.removesuffix('/v1').rstrip('/')}")

    @classmethod
    def parse(cls, text: str) -> EngineAddress:
        """Read [CHANNEL=]URL. Raises `ValueError` for anything else.

        Parameters
        ----------
        text
            The address as on the command line.
        """
        channel, equals, url = text.partition("=")
        if not equals or "/" in channel:
            return cls(check_server_url(text))
        if not READER.fullmatch(channel):
            raise ValueError(f"{channel!r} is not the name of a channel")
        return cls(check_server_url(url), channel)


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """Say how a gateway serves and records.

    Parameters
    ----------
    engines
        The engines. Users who belong to no other channel get the channel of the first one.
    name
        The name of the gateway, in the keys of what it records.
    journal
        The directory that keeps what the store does not have yet. It must survive a restart of the gateway.
    journal_bytes
        The most bytes of the journal. When it is full, answers are no longer recorded.
    share
        The part of the answers that is recorded, from 0 to 1.
    consent
        Whether an answer may be trained on if its request does not say so in the header `x-deltawire-consent`.
    text
        Whether the text of conversations is recorded, after redaction.
    redact
        Decides what is recorded of an answer, with or without `text`. It is called on a thread of its own, for one answer at a time.
    keys
        The file with API keys. Without one everybody who reaches the gateway may use it.
    user_key
        A secret for the hashes of users' names, at least 16 bytes. Gateways with the same secret give a user the same hash. None draws one
        and keeps it in the journal.
    engine_key
        The API key that engines ask for.
    names
        Names under which clients may reach the gateway, in addition to localhost and addresses in numbers.
    origins
        The origins, such as "https://app.example", whose pages may use the gateway from a browser.
    patience
        Seconds that a request waits for an engine that can answer it.
    probe
        Seconds between two looks at each engine, and at the channels.
    flush
        Seconds after which recorded answers go to the store, even if they are few, and after which the journal is synced to the disk.
    most_bytes
        The most bytes of a request or of an answer that is not streamed.
    memory_bytes
        The most bytes of memory that requests, their answers and answers that wait to be recorded take together, about. Requests beyond it
        are refused with status 503. The requests of one owner of API keys take at most half of it.
    most_requests
        The most requests at the same time.
    requests_per_caller
        The most requests at the same time of one owner of API keys, so that no caller keeps all others out.
    known_ids
        The most interactions that the gateway remembers for feedback. Each takes about 300 bytes.
    store_seconds
        Seconds that the store has to confirm feedback.
    strict_metrics
        Whether feedback is refused if its metric is not declared in the store.
    """

    engines: Sequence[EngineAddress]
    name: str = "gateway"
    journal: Path = field(default_factory=lambda: Path.home() / ".local" / "state" / "deltawire" / "gateway")
    journal_bytes: int = 1 << 30
    share: float = 1.0
    consent: bool = True
    text: bool = False
    redact: Redact | None = None
    keys: Path | None = None
    user_key: bytes | None = None
    engine_key: str | None = None
    names: Sequence[str] = ()
    origins: Sequence[str] = ()
    patience: float = 300.0
    probe: float = 0.25
    flush: float = 1.0
    most_bytes: int = 32 << 20
    memory_bytes: int = 1 << 30
    most_requests: int = 2048
    requests_per_caller: int = 1024
    known_ids: int = 200_000
    store_seconds: float = 30.0
    strict_metrics: bool = False

    def __post_init__(self) -> None:
        if not self.engines:
            raise ValueError("a gateway needs at least one engine")
        if not GATEWAY_NAME.fullmatch(self.name):
            raise ValueError(f"{self.name!r} cannot name a gateway: 1 to 40 letters, digits, '_' and '-', the first a letter or a digit")
        for origin in self.origins:
            if check_origin(origin) != origin:
                raise ValueError(f"write the origin {origin!r} in lower case, as browsers send it")
        if not 0 <= self.share <= 1:
            raise ValueError("share is from 0 to 1")
        if self.user_key is not None and len(self.user_key) < 16:
            raise ValueError("user_key needs at least 16 bytes")
        if (
            min(self.patience, self.probe, self.flush, self.store_seconds) <= 0
            or min(self.most_bytes, self.memory_bytes, self.most_requests, self.requests_per_caller) < 1
        ):
            raise ValueError("times and limits must be positive")
