"""A chain, and subscribers of both kinds: in memory, and with a mirror."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from counting_store import Subscribe
from toy_chain import ToyChain, first_state

from deltawire.chain.reader_options import ReaderOptions
from deltawire.store import Store
from deltawire.store.memory import MemoryStore
from deltawire.subscribe import Subscriber


@pytest.fixture
def chain() -> ToyChain:
    chain = ToyChain(MemoryStore())
    chain.anchor(first_state())
    return chain


@pytest.fixture(params=["memory", "mirror"])
def subscribe(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Subscribe]:
    """Return a function that opens subscribers of one kind. All that have a mirror share it."""
    made: list[Subscriber] = []

    def make(chain: ToyChain | Store, **options: Any) -> Subscriber:
        store = chain.store if isinstance(chain, ToyChain) else chain
        others = {name: options.pop(name) for name in ("mirror", "threads", "on_event", "undo_bytes", "replica") if name in options}
        if request.param == "mirror":
            others = {"mirror": tmp_path / "mirror"} | others
        made.append(Subscriber(store, options=ReaderOptions(**({"patience": 0.0} | options)), **others))
        return made[-1]

    yield make
    for subscriber in made:
        subscriber.close()
