"""The answers that an engine server keeps for a short time, so that a gateway can read exactly what the engine drew.

A server that keeps answers has two routes, and docs/live.md describes their contents:

    GET /deltawire/engine         the label of the weights, and whether the engine runs
    GET /deltawire/answers/{id}   token ids, log-probs and labels of one answer; the gateway chose the id, in the header X-Request-Id

An answer is kept only for a request with the header `x-deltawire-record`. Old answers are dropped when there are too many.
"""

from __future__ import annotations

import hmac
import json
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

RECORD_HEADER = "x-deltawire-record"
"""A request with this header asks the server to keep the answer."""
REQUEST_ID = "x-request-id"
ENGINE_ROUTE = "/deltawire/engine"
ANSWERS_ROUTE = "/deltawire/answers/"
_ID = re.compile(r"[A-Za-z0-9_.-]{1,128}")


class AnswerTable:
    """Keeps encoded answers by id, and drops the oldest ones.

    Parameters
    ----------
    most
        The most answers to keep.
    most_bytes
        The most bytes of all answers together.
    """

    def __init__(self, most: int = 16384, most_bytes: int = 256 << 20) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._answers: OrderedDict[str, bytes] = OrderedDict()
        self._bytes = 0

    def put(self, answer: str, calls: Sequence[Mapping[str, Any]], *, logprobs: str | None) -> None:
        """Keep an answer, and replace an earlier one with this id.

        Parameters
        ----------
        answer
            The id of the answer.
        calls
            What the engine drew: one entry for each prompt, with "prompt_token_ids" and "choices".
        logprobs
            The kind of the log-probs, such as "processed_logprobs". None if it is not known.
        """
        if not _ID.fullmatch(answer):
            return
        record = {"deltawire": "answer", "version": 1, "id": answer, "logprobs": logprobs, "calls": list(calls)}
        data = json.dumps(record, separators=(",", ":")).encode()
        self._drop(answer)
        self._answers[answer] = data
        self._bytes += len(data)
        while self._answers and (len(self._answers) > self._most or self._bytes > self._most_bytes):
            self._drop(next(iter(self._answers)))

    def get(self, answer: str) -> bytes | None:
        """Return an answer, or None if it is not kept.

        Parameters
        ----------
        answer
            The id of the answer.
        """
        return self._answers.get(answer)

    def _drop(self, answer: str) -> None:
        self._bytes -= len(self._answers.pop(answer, b""))


def has_key(authorization: str | None, keys: Sequence[str]) -> bool:
    """Return whether a request may read answers: it has one of the server's keys, or the server has none. All keys are compared.

    Parameters
    ----------
    authorization
        The header Authorization.
    keys
        The keys of the server.
    """
    given = (authorization or "").removeprefix("Bearer ").encode(errors="replace")
    return not keys or bool(sum(hmac.compare_digest(given, key.encode()) for key in keys))
