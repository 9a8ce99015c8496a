"""Canary records: tokens that a healthy engine generated with a version, and their log-probs (docs/protocol.md §2).

An engine with the same weights must generate the same tokens with nearly the same log-probs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .canonical import CanonicalRecord, Fields
from .record_parts import NONCE, CommitRef, Signature, read_signature

MOST_PROMPTS, MOST_TOKENS = 16, 64
"""A record has at most this many prompts, each with at most this many tokens, and as many that continue it."""
_MOST_TOKEN_ID = 2**31 - 1
_MOST_LOGPROB = 10**9
"""Log-probs are recorded as -1,000,000 times their value, up to this number."""


@dataclass(frozen=True, slots=True)
class RecordedTokens:
    """A prompt, the most probable tokens that continue it, and the log-prob of each of them."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]

    def plain(self) -> dict[str, Any]:
        """Return the values for the record. Raises ValueError if a log-prob is not a number."""
        if not all(map(math.isfinite, self.logprobs)):
            raise ValueError("a log-prob is not a number")
        scaled = [min(max(round(-1e6 * each), 0), _MOST_LOGPROB) for each in self.logprobs]
        return {"prompt": list(self.prompt), "tokens": list(self.tokens), "logprobs": scaled}

    @classmethod
    def of(cls, fields: Fields) -> RecordedTokens:
        """Read and check the values of a record."""
        prompt, tokens = _integers(fields, "prompt", _MOST_TOKEN_ID), _integers(fields, "tokens", _MOST_TOKEN_ID)
        scaled = _integers(fields, "logprobs", _MOST_LOGPROB)
        fields.done()
        if len(scaled) != len(tokens):
            fields.refuse("it does not have one log-prob for each token")
        return cls(prompt, tokens, tuple(each / -1e6 for each in scaled))


@dataclass(frozen=True, slots=True)
class CanaryRecord(CanonicalRecord):
    """The tokens that a healthy engine generated with the version `target`."""

    id: str
    nonce: str
    time: int
    target: CommitRef
    recorded: tuple[RecordedTokens, ...]
    signature: Signature | None = None

    def describe(self) -> str:
        """Return the name of the record for error messages."""
        return f"the canary record of commit {self.target.seq}"

    def plain(self) -> dict[str, Any]:
        own = {"id": self.id, "nonce": self.nonce, "time": self.time, "target": self.target.plain()}
        recorded = [each.plain() for each in self.recorded]
        return {"deltawire": "canary", "version": 1, **own, "recorded": recorded, "signature": self.signature and self.signature.plain()}

    @classmethod
    def parse(cls, data: bytes) -> CanaryRecord:
        fields = Fields.parse(data, "canary")
        record = cls(
            id=fields.matching("id", NONCE),
            nonce=fields.matching("nonce", NONCE),
            time=fields.integer("time"),
            target=CommitRef.of(fields.object("target")),
            recorded=tuple(RecordedTokens.of(inner) for inner in fields.objects("recorded")),
            signature=read_signature(fields),
        )
        fields.done()
        if not 1 <= len(record.recorded) <= MOST_PROMPTS:
            fields.refuse(f"it has {len(record.recorded)} prompts; 1 to {MOST_PROMPTS} are allowed")
        return record


def _integers(fields: Fields, name: str, most: int) -> tuple[int, ...]:
    found: Sequence[object] = fields.items(name)
    if not 1 <= len(found) <= MOST_TOKENS:
        fields.refuse(f"{name} has {len(found)} values; 1 to {MOST_TOKENS} are allowed")
    checked = tuple(each for each in found if type(each) is int and 0 <= each <= most)
    if len(checked) != len(found):
        fields.refuse(f"{name} must hold integers from 0 to {most}")
    return checked
