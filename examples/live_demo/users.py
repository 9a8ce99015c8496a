"""Simulated users: they ask through the gateway all the time, rate the answers later, sometimes twice, and sometimes not at all."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from dataclasses import dataclass, field

import aiohttp
import taste

USERS = 500
_AT_ONCE = 24
_THINKING = 0.5
"""Mean seconds between two requests of a user who is there."""
_LATEST = 1.5
"""Feedback comes at most this many seconds after the answer."""
_SILENT, _REVISED = 0.1, 0.05
"""The shares of answers that get no feedback, and that are rated a second time."""


@dataclass(frozen=True, slots=True)
class Reaction:
    """One answer, and what the user thinks of it."""

    at: float
    channel: str
    seq: str
    rating: float


@dataclass
class Crowd:
    """Users of a gateway, on a thread of their own.

    Parameters
    ----------
    url
        The address of the gateway.
    seed
        Decides who asks what.
    """

    url: str
    seed: int = 0
    reactions: list[Reaction] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    """Every request that was not answered, or whose feedback was not accepted."""

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._ask()), name="demo-users")

    def start(self) -> None:
        """Begin to ask."""
        self._thread.start()

    def leave(self) -> None:
        """Ask nothing more, and wait until everything was answered."""
        self._stop.set()
        self._thread.join()

    async def _ask(self) -> None:
        # The connections are given up before the gateway closes them, so that no request meets a connection that is just being closed.
        connector = aiohttp.TCPConnector(limit=2 * _AT_ONCE, keepalive_timeout=2.0)
        timeout = aiohttp.ClientTimeout(total=600.0)
        async with aiohttp.ClientSession(self.url, connector=connector, timeout=timeout, raise_for_status=True) as client:
            await asyncio.gather(*(self._user(client, random.Random(f"{self.seed}/{number}")) for number in range(_AT_ONCE)))

    async def _user(self, client: aiohttp.ClientSession, draw: random.Random) -> None:
        late: set[asyncio.Task[None]] = set()
        while not self._stop.is_set():
            await asyncio.sleep(draw.expovariate(1 / _THINKING))
            body = {"model": "policy", "prompt": draw.choice(taste.PROMPTS), "max_tokens": taste.LENGTH, "temperature": 1.0}
            try:
                async with client.post("/v1/completions", json={**body, "user": f"user-{draw.randrange(USERS)}"}) as answered:
                    text = (await answered.json())["choices"][0]["text"]
            except (aiohttp.ClientError, asyncio.TimeoutError) as error:
                self.failures.append(f"a request failed: {error!r}")
                continue
            value = taste.rating(text, draw)
            headers = answered.headers
            self.reactions.append(
                Reaction(time.monotonic(), headers.get("x-deltawire-channel", ""), headers.get("x-deltawire-version", ""), value)
            )
            if draw.random() >= _SILENT:
                late.add(asyncio.ensure_future(self._rate(client, headers["x-deltawire-inference-id"], value, draw)))
                late = {task for task in late if not task.done()}
        await asyncio.gather(*late)

    async def _rate(self, client: aiohttp.ClientSession, answer: str, value: float, draw: random.Random) -> None:
        await asyncio.sleep(draw.uniform(0.2, 1.0) * _LATEST)
        for revision in range(2 if draw.random() < _REVISED else 1):
            body = {"inference_id": answer, "metric_name": taste.LIKES.name, "value": value, "revision": revision}
            try:
                async with client.post("/feedback", json=body) as answered:
                    await answered.read()
            except (aiohttp.ClientError, asyncio.TimeoutError) as error:
                self.failures.append(f"feedback failed: {error!r}")
