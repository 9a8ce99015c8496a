"""The answers that an engine server keeps for a short time, so that a gateway can read exactly what the engine drew.

A server that keeps answers has two routes, and docs/live.md describes their contents:

    GET /deltawire/engine         the label of the weights, and whether the engine runs
    GET /deltawire/answers/{id}   token ids, log-probs and labels of one answer; the gateway chose the id, in the header X-Request-Id
    GET /deltawire/answers/?ids=  the same of several answers: at most 64 ids, with commas between them

The answer for several ids is `{"deltawire":"answers","version":1,"answers":[…],"left":[id, …]}`. It has about a megabyte at most, and the
ids that are "left" must be asked for again. Ids that are in neither list are not kept. Older servers answer this with status 404.

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
MOST_LISTED, _MOST_LIST_BYTES = 64, 1 << 20
"""The most answers that are asked for at once. A list ends before it has more bytes, but has at least one answer."""
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
            What the engine drew: one entry for each prompt, with "prompt_token_ids" and "choices". "temperature" and "top_p" are those
            that it used, and "changed_by" lists the other parameters that changed what it drew (`sampling_changes`).
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

    def reply(self, path: str, query: bytes) -> bytes | None:
        """Return what a request for answers gets, or None if there is none.

        Parameters
        ----------
        path
            The path of the request, which begins with `ANSWERS_ROUTE`.
        query
            The part of its address after the question mark.
        """
        name = path.removeprefix(ANSWERS_ROUTE)
        if name or not query.startswith(b"ids="):
            return self.get(name)
        ids = query.removeprefix(b"ids=").decode("latin-1").split(",")
        return self._listed(ids) if len(ids) <= MOST_LISTED else None

    def _listed(self, ids: Sequence[str]) -> bytes:
        found: list[bytes] = []
        left: list[str] = []
        size = 0
        for name in ids:
            if (data := self._answers.get(name)) is None:
                continue
            size += len(data)
            if found and size > _MOST_LIST_BYTES:
                left.append(name)
            else:
                found.append(data)
        head = b'{"deltawire":"answers","version":1,"answers":['
        return head + b",".join(found) + b'],"left":' + json.dumps(left, separators=(",", ":")).encode() + b"}"

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
