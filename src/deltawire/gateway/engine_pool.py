"""Knows which engines run and which version each has, and chooses one for a request.

An engine that was probed successfully is up. It gets requests if its version is on its channel. While no engine of a channel can answer,
requests wait: an engine that swaps, restarts or is repaired is used again as soon as a probe finds it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from ..engines.answer_table import ENGINE_ROUTE
from ..errors import DeltawireError, EngineLost, EnginesAway
from ..events import OnEvent, emit
from .engine_client import EngineClient, NoAnswer
from .http.memory import Reservation
from .http.stoppable import Stoppable
from .options import EngineAddress

_PROBE_SECONDS = 10.0
"""An engine that does not answer a probe within this time is away. A busy one answers late."""
_MOST_STATE = 1 << 16


class Channels(Protocol):
    """The questions that the pool asks about channels."""

    def rank(self, channel: str | None, seq: int | None) -> int | None:
        """Return how good a version is for a channel: 0 for its present version, more for earlier ones, None if it was never there."""

    def exists(self, channel: str | None) -> bool:
        """Return whether there is a channel of that name. There is always the chain itself, None."""


@dataclass(slots=True, eq=False)
class PooledEngine:
    """An engine, and what the last probe found.

    Parameters
    ----------
    address
        Its address and channel.
    up
        Whether it answers.
    problem
        What was wrong when it was found away, without details of its host. None if it never was, or is back.
    seq
        The number of its version. None if it has none, or does not tell.
    keeps_answers
        Whether it has the routes of `engines.answer_table`.
    running
        Whether it generates. While it is paused, requests wait there.
    logprobs
        The kind of its log-probs. None if it does not tell.
    in_flight
        The number of requests that it is answering.
    """

    address: EngineAddress
    up: bool = False
    problem: str | None = None
    seq: int | None = None
    keeps_answers: bool = False
    running: bool = True
    logprobs: str | None = None
    in_flight: int = 0


class EngineAnswer(NamedTuple):
    """An answer of an engine as a whole."""

    status: int
    kind: str
    """Its content type."""
    data: bytes


class EnginePool:
    """The engines of a gateway. Use it from one event loop.

    Parameters
    ----------
    addresses
        The engines.
    channels
        Knows which versions are on which channel.
    client
        Sends requests to engines.
    key
        The API key that engines ask for.
    probe
        Seconds between two probes of an engine.
    patience
        Seconds that a request waits for an engine.
    on_event
        Called with "engine-away" and "engine-back". Only these tell details of what is wrong.
    """

    def __init__(
        self,
        addresses: Sequence[EngineAddress],
        channels: Channels,
        client: EngineClient,
        *,
        key: str | None = None,
        probe: float = 0.25,
        patience: float = 300.0,
        on_event: OnEvent | None = None,
    ) -> None:
        self.engines = tuple(PooledEngine(address) for address in addresses)
        self.main = self.engines[0].address.channel
        """The channel of users who belong to no other."""
        self.client = client
        self.headers = {} if key is None else {"authorization": f"Bearer {key}"}
        """The headers that every request to an engine has."""
        self._channels = channels
        self._probe, self._patience = probe, patience
        self._on_event = on_event
        self._changed = asyncio.Event()
        self._turn = itertools.count()
        self._tasks: list[asyncio.Task[None]] = []
        self._hurry = {id(engine): asyncio.Event() for engine in self.engines}

    @property
    def channels(self) -> set[str | None]:
        """The channels that some engine follows."""
        return {engine.address.channel for engine in self.engines}

    def start(self) -> None:
        """Begin to probe the engines."""
        self._tasks = [asyncio.create_task(self._watch(engine)) for engine in self.engines]

    async def close(self) -> None:
        """Stop probing."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def wake(self) -> None:
        """Let waiting requests look for an engine again."""
        self._changed.set()
        self._changed = asyncio.Event()

    @property
    def ready(self) -> int:
        """The number of engines that answer and whose channel exists."""
        return sum(engine.up and self._channels.exists(engine.address.channel) for engine in self.engines)

    async def take(
        self, channel: str | None, avoided: PooledEngine | None = None, *, stays: bool = False, most: float | None = None
    ) -> PooledEngine:
        """Return an engine for a request of this channel, and count the request. Raises `EnginesAway` if none can answer in time.

        If no engine of the channel can answer, one of the main channel does.

        Parameters
        ----------
        channel
            The channel.
        avoided
            An engine that is used only if there is no other.
        stays
            Whether the avoided engine is used before one of the main channel.
        most
            Wait at most this many seconds, and never longer than `patience`.
        """
        patience = self._patience if most is None else min(most, self._patience)
        deadline = asyncio.get_running_loop().time() + patience
        while True:
            found = self._best(channel, avoided) or (self._best(channel, None) if stays else None) or self._best(self.main, avoided)
            if found is not None:
                break
            avoided = None  # it may be the only one
            changed = self._changed
            if (found := self._best(channel, None) or self._best(self.main, None)) is not None:
                break
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0:
                raise EnginesAway(self._why(channel, patience))
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(changed.wait(), left)
        found.in_flight += 1
        return found

    def give_back(self, engine: PooledEngine) -> None:
        """Say that a request has ended."""
        engine.in_flight -= 1

    def lost(self, engine: PooledEngine, error: Exception) -> None:
        """Say that an engine did not answer a request. It gets no more of them until a probe finds it."""
        self._set_away(engine, error)
        self._hurry[id(engine)].set()

    def _best(self, channel: str | None, avoided: PooledEngine | None) -> PooledEngine | None:
        ranked = [
            (rank, not engine.running, engine.in_flight, (index + next(self._turn)) % len(self.engines), index)
            for index, engine in enumerate(self.engines)
            if engine.up and engine is not avoided and engine.address.channel == channel
            if engine.seq is not None or not engine.keeps_answers  # it has no version yet, or its weights are unknown
            if (rank := self._channels.rank(channel, engine.seq)) is not None
        ]
        return self.engines[min(ranked)[-1]] if ranked else None

    def _why(self, channel: str | None, patience: float) -> str:
        name = "the chain" if channel is None else f"channel {channel!r}"
        told = "; ".join(f"engine {number}: {self._problem(engine)}" for number, engine in enumerate(self.engines, 1))
        return f"no engine with a version of {name} answered within {patience:g} s ({told:.500})."

    def _problem(self, engine: PooledEngine) -> str:
        """Say why an engine gets no requests. Callers read it, so it does not name the host."""
        if not engine.up:
            return engine.problem or "it has not answered yet"
        if not self._channels.exists(engine.address.channel):
            return f"there is no channel {engine.address.channel!r}"
        if engine.seq is None:
            return "it has no version yet"
        on_channel = self._channels.rank(engine.address.channel, engine.seq) is not None
        return f"it has commit {engine.seq}{'' if on_channel else ', which is not on its channel'}"

    async def _watch(self, engine: PooledEngine) -> None:
        hurry = self._hurry[id(engine)]
        while True:
            await self.look(engine)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(hurry.wait(), self._probe)
                hurry.clear()
                await asyncio.sleep(min(self._probe, 0.05))

    async def get(self, url: str, *, most: int, memory: Reservation | None = None, seconds: float = 60.0) -> EngineAnswer:
        """Ask an engine with GET. Raises `EngineLost` if the answer is too long, `GatewayFull`, and `NoAnswer`.

        Parameters
        ----------
        url
            The address of the route.
        most
            The most bytes of the answer.
        memory
            The memory for the answer.
        seconds
            Seconds that the engine may be silent.
        """
        response = await self.client.get(url, self.headers, seconds=seconds)
        try:
            return EngineAnswer(response.status, response.kind, await joined(response.chunks(), most, memory))
        finally:
            response.close()

    async def look(self, engine: PooledEngine) -> None:
        """Ask an engine for its state, and note it."""
        try:
            state, keeps = await self._state(engine)
        except Exception as error:  # the answer of an engine may be anything
            self._set_away(engine, error)
            return
        label = state.get("label", state.get("weight_version"))
        seq = int(label) if isinstance(label, str) and label.isascii() and label.isdigit() and len(label) < 20 else None
        mode = state.get("logprobs")
        before = (engine.up, engine.seq, engine.keeps_answers, engine.running)
        engine.problem = None
        was_up, engine.up, engine.seq, engine.keeps_answers = engine.up, True, seq, keeps
        engine.logprobs = mode if isinstance(mode, str) else None
        engine.running = state.get("running", True) is not False
        if not was_up:
            emit(self._on_event, "engine-back", engine=engine.address.url, seq=seq)
        if before != (True, seq, keeps, engine.running):
            self.wake()

    async def _state(self, engine: PooledEngine) -> tuple[dict[str, Any], bool]:
        """Ask for the state of an engine. vLLM without our middleware has another route. Other servers tell only that they run."""
        for route, keeps in ((ENGINE_ROUTE, True), ("/weight_info", False), ("/health", False)):
            with Stoppable(_PROBE_SECONDS):
                answer = await self.get(engine.address.url + route, most=_MOST_STATE, seconds=_PROBE_SECONDS)
            if answer.status == 200:
                found = json.loads(answer.data) if answer.data[:1] == b"{" else {}
                return (found if isinstance(found, dict) else {}), keeps
            if answer.status not in (401, 403, 404, 405):
                break
        raise NoAnswer(f"{route} answered with status {answer.status}", was_sent=True, short=f"it answers with status {answer.status}")

    def _set_away(self, engine: PooledEngine, error: Exception) -> None:
        reason, short = _reasons(error)
        is_news = engine.up or engine.problem is None
        engine.up, engine.problem = False, short
        if is_news:
            emit(self._on_event, "engine-away", engine=engine.address.url, reason=reason)


def _reasons(error: Exception) -> tuple[str, str]:
    """Return what an error means, for the operator and for callers."""
    if isinstance(error, NoAnswer):
        return str(error), error.short
    if isinstance(error, asyncio.TimeoutError):
        return (reason := f"it did not answer within {_PROBE_SECONDS:g} s"), reason
    text = error.message if isinstance(error, DeltawireError) else str(error)
    return f"{type(error).__name__}: {text[:200]}", "it does not answer as an engine does"


async def joined(chunks: AsyncIterator[bytes], most: int, memory: Reservation | None = None) -> bytes:
    """Return the body of an answer. Raises `EngineLost` if it has more than `most` bytes, and `GatewayFull` if it does not fit.

    Parameters
    ----------
    chunks
        Yields the body.
    most
        The most bytes.
    memory
        The memory for the answer.
    """
    parts, size = [], 0
    async for chunk in chunks:
        size += len(chunk)
        if size > most:
            raise EngineLost(f"the answer of the engine has more than {most:,} bytes.")
        if memory is not None:
            memory.add(2 * len(chunk))  # the chunk, and the whole answer
        parts.append(chunk)
    return b"".join(parts)
