"""Generates for many callers at once with a model in this process, whose weights may change between any two forward passes.

Requests that wait are taken together as one batch. Each has its own sampling, and gets every token as soon as it is drawn.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...chain.version import Version
from ...errors import DeltawireError, EngineUnavailable
from ..sampling import Batch, ForwardPass, draw


@dataclass(frozen=True, slots=True)
class DrawnToken:
    """One token.

    Parameters
    ----------
    token
        Its id.
    logprob
        Its log-prob under the distribution that it was drawn from.
    seq
        The number of the version that drew it.
    finish
        None, or why the completion ends with it: "stop" or "length".
    """

    token: int
    logprob: float
    seq: int
    finish: str | None = None


@dataclass(slots=True, eq=False)
class WantedCompletion:
    """A completion that is wanted.

    Parameters
    ----------
    prompt
        The token ids of the prompt, at least one.
    max_tokens
        The most tokens to draw.
    temperature
        0 takes the most probable token.
    top_p
        Draw from the most probable tokens whose probabilities sum to this.
    seed
        Makes the draws repeatable. None draws a seed.
    on_token
        Called with each token, or with an error that ended the completion, on the thread of the server.
    """

    prompt: Sequence[int]
    max_tokens: int
    temperature: float
    top_p: float
    seed: int | None
    on_token: Callable[[DrawnToken | Exception], None]
    is_cancelled: bool = False
    drawn: int = 0
    is_live: bool = True
    chance: Any = field(default=None)


class BatchServer:
    """Draws completions on one thread.

    Parameters
    ----------
    model
        The model.
    forward_pass
        Entered around every forward pass. It yields the version of the weights.
    stop_tokens
        The tokens that end a completion.
    most
        The most completions in one batch.
    """

    def __init__(self, model: Any, forward_pass: ForwardPass, stop_tokens: Collection[int], *, most: int = 32) -> None:
        self._model, self._forward_pass, self._stop_tokens, self._most = model, forward_pass, frozenset(stop_tokens), most
        self._waiting: deque[WantedCompletion] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="deltawire-batches", daemon=True)

    def start(self) -> None:
        """Begin to draw."""
        self._thread.start()

    def add(self, wanted: Sequence[WantedCompletion]) -> None:
        """Draw these completions soon."""
        with self._changed:
            self._waiting.extend(wanted)
            self._changed.notify_all()

    def close(self) -> None:
        """Stop. Completions that are not finished get an error."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                rows = [self._waiting.popleft() for _ in range(min(self._most, len(self._waiting)))]
                is_closed = self._is_closed
            live = [row for row in rows if not row.is_cancelled]
            if is_closed:
                for row in (*live, *self._waiting):
                    row.on_token(EngineUnavailable("the server ends."))
                return
            try:
                if live:
                    self._draw(live)
            except Exception as error:  # a swap that failed, or a model that cannot process these tokens
                known = error if isinstance(error, DeltawireError) else EngineUnavailable(f"the model failed: {error!r:.200}.")
                for row in live:
                    if row.is_live:
                        row.on_token(known)

    def _draw(self, rows: Sequence[WantedCompletion]) -> None:
        batch = Batch(self._model, [row.prompt for row in rows])
        for row in rows:
            row.chance = torch.Generator(device=batch.device)
            row.chance.seed() if row.seed is None else row.chance.manual_seed(row.seed % (1 << 63))
        with torch.inference_mode():
            while any(row.is_live for row in rows) and not self._is_closed:
                with self._forward_pass() as version:
                    logits = batch.forward()
                tokens = torch.zeros(len(logits), dtype=torch.long, device=batch.device)
                for number, row in enumerate(batch.rows(rows)):
                    if row.is_live:
                        tokens[number] = self._add(row, logits[number : number + 1], version)
                batch.advance(tokens, [row.is_live for row in batch.rows(rows)])
        for row in rows:
            if row.is_live and not row.is_cancelled:
                row.on_token(EngineUnavailable("the server ends."))

    def _add(self, row: WantedCompletion, logits: torch.Tensor, version: Version) -> int:
        """Draw the next token of a completion."""
        tokens, logprobs = draw(logits, row.temperature, row.top_p, row.chance)
        token = int(tokens[0])
        row.drawn += 1
        finish = "stop" if token in self._stop_tokens else "length" if row.drawn >= row.max_tokens else None
        row.is_live = finish is None and not row.is_cancelled
        if not row.is_cancelled:
            row.on_token(DrawnToken(token, float(logprobs[0]), version.seq, finish))
        return token
