"""Servers swap in one call while they answer requests. Each token shows the version that made it, and has the label of this version."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
from live_server import LiveServer, wait_until
from revealing_versions import reveal, version_of
from tiny_checkpoints import TinyModel, runtime_hashes

from deltawire.chain.log import ChainLog
from deltawire.chain.reader_options import ReaderOptions
from deltawire.engines import KvCache
from deltawire.engines.http_session import http_session
from deltawire.engines.vllm.driver.sidecar import Sidecar
from deltawire.engines.vllm.driver.token_route import TOKEN_ROUTE, LabelledTokens, read_choice, token_request
from deltawire.errors import NoChannel
from deltawire.events import Event
from deltawire.publish.channels import ChannelWriter
from deltawire.store import open_store

pytestmark = pytest.mark.slow

CLIENTS, TOKENS, SWAPS = 4, 60, 3


class Clients:
    """Requests all the time. Their completions, with labels, are in `made` when the context has ended."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(client,)) for client in range(CLIENTS)]
        self.made: list[LabelledTokens] = []

    def _ask(self, client: int) -> None:
        with http_session(self._url) as session:
            while not self._stop.is_set():
                sampling = {"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}
                answer = session.ask("POST", TOKEN_ROUTE, token_request("tiny", [10 + client, 20], sampling), timeout=300)
                assert answer.status == 200, answer.text
                self.made.append(read_choice(json.loads(answer.content)["choices"][0]))

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def cached_tokens(server: LiveServer) -> int:
    """Return how many tokens of a long prompt, which is always the same, the server had in its KV cache."""
    body = {"model": "tiny", "prompt": list(range(3, 250)), "max_tokens": 1}
    with http_session(server.url) as session:
        answer = session.ask("POST", "/v1/completions", body, timeout=300)
    return int((json.loads(answer.content)["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0)


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_token_has_the_label_of_the_version_that_made_it(
    ranks: int, start_run: Callable[[TinyModel], Any], serve: Callable[..., LiveServer]
) -> None:
    run = start_run(TinyModel("dense"))
    arguments = ["--enable-scale-out", "--enable-prompt-tokens-details"]
    server = serve(run.checkpoint, ranks=ranks, arguments=arguments, environment={"DELTAWIRE_HOLD": "1"}).wait()
    early: list[list[int]] = []
    waiting = threading.Thread(target=lambda: early.append(server.generate(tokens=3)))
    waiting.start()
    assert server.routes.is_paused()
    assert all(worker["held"] for worker in server.routes.status())
    numbers: dict[str, int] = {}
    """The number that the tokens of a version reveal, by its label."""
    events: list[Event] = []

    def swap(sidecar: Sidecar) -> None:
        number = len(numbers)
        reveal(run.state, number)
        numbers[str(run.publish(changed=False).seq)] = number
        assert sidecar.step() is not None

    mirror = None if ranks == 1 else run.mirror
    for kv_cache in (KvCache.KEEP, KvCache.DROP):
        sidecar = Sidecar(server.url, run.store, mirror, spool=run.folder / "spool", kv_cache=kv_cache, on_event=events.append)
        swap(sidecar)
        waiting.join()
        with Clients(server.url) as clients:
            done = 0
            while done < SWAPS or not any(len(made.spans or ()) > 1 for made in clients.made):
                before = len(clients.made)
                swap(sidecar)
                done += 1
                wait_until(lambda: len(clients.made) > before, "a completion that ends after the swap")  # noqa: B023
        assert all(len(made.tokens) == TOKENS for made in clients.made)
        for made in clients.made:
            assert [version_of(token) for token in made.tokens] == [numbers[label] for label in made.labels()]
            assert made.tokens == sorted(made.tokens, key=version_of)
        cached_tokens(server)
        assert cached_tokens(server) > 0
        swap(sidecar)
        assert (cached_tokens(server) > 0) == (kv_cache is KvCache.KEEP)
        sidecar.close()
    with closing(
        Sidecar(server.url, run.store, mirror, spool=run.folder / "spool", kv_cache=KvCache.MARK, on_event=events.append)
    ) as sidecar:
        for _ in range(2):
            swap(sidecar)
            assert cached_tokens(server) == 0  # although it is kept for requests that run, and the request has no salt
            assert cached_tokens(server) > 0
    assert [version_of(token) for token in early[0]] == [0, 0, 0]  # this request came before the first version
    assert server.routes.checksums() == runtime_hashes(run.state, ranks)
    swaps = [event.fields for event in events if event.name == "swapped"]
    assert [swap["loaded_anew"] for swap in swaps] == [1] + [0] * (len(swaps) - 1)
    assert [swap["http_calls"] for swap in swaps] == [1] * len(swaps)
    assert len(swaps) == len(numbers)
    assert all(swap["preempted"] == 0 for swap in swaps if swap["kv_cache"] == "keep")
    assert any(int(swap["preempted"] or 0) > 0 for swap in swaps if swap["kv_cache"] == "drop")


def test_a_server_that_follows_a_channel_generates_with_no_version_between(
    start_run: Callable[[TinyModel], Any], serve: Callable[..., LiveServer]
) -> None:
    run = start_run(TinyModel("dense"))
    server = serve(run.checkpoint, arguments=["--enable-scale-out"], environment={"DELTAWIRE_HOLD": "1"}).wait()
    seqs: list[int] = []
    """The commits of the versions. The tokens of a version reveal its index."""
    events: list[Event] = []

    def publish() -> None:
        reveal(run.state, len(seqs))
        seqs.append(run.publish(changed=False).seq)

    publish()
    first = runtime_hashes(run.state, 1)
    with (
        open_store(run.store) as store,
        closing(
            Sidecar(
                server.url,
                run.store,
                spool=run.folder / "spool",
                kv_cache=KvCache.KEEP,
                options=ReaderOptions(channel="stable"),
                on_event=events.append,
            )
        ) as sidecar,
    ):
        log = ChainLog(store)
        stable = ChannelWriter(log, "stable")

        def promote(index: int) -> None:
            commit = log.read(seqs[index])
            assert commit is not None
            stable.promote(commit)

        with pytest.raises(NoChannel):
            sidecar.step()
        assert server.routes.is_paused()
        promote(0)
        assert sidecar.step() is not None
        with Clients(server.url) as clients:

            def step(index: int | None) -> None:
                """Let the sidecar look, and check which version it swaps in. Wait for a completion that ends after that."""
                before, swapped = len(clients.made), sidecar.step()
                assert (None if swapped is None else swapped.seq) == (None if index is None else seqs[index])
                wait_until(lambda: len(clients.made) > before + CLIENTS, "completions that began after the swap")

            for _ in range(3):
                publish()
                step(None)  # it is on no channel
            promote(3)
            step(3)
            stable.rollback()
            step(0)  # the workers write back what the three updates replaced
            assert [worker["undo"] for worker in server.routes.status()] == [[]]
    for made in clients.made:
        assert {version_of(token) for token in made.tokens} <= {0, 3}
        assert [seqs[version_of(token)] for token in made.tokens] == [int(label) for label in made.labels()]
    assert {version_of(token) for made in clients.made for token in made.tokens} == {0, 3}
    assert server.routes.checksums() == first
    swaps = [event.fields for event in events if event.name == "swapped"]
    assert [(swap["seq"], swap["loaded_anew"]) for swap in swaps] == [(seqs[0], 1), (seqs[3], 0), (seqs[0], 0)]
    assert [swap["http_calls"] for swap in swaps] == [1, 1, 1]
