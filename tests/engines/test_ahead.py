"""A module engine decodes announced files against its live weights before the commit. The weights change only in the swap."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from announced_files import BeforeCommits, announce_at_once, look_and_arrive
from tiny_models import bits, qwen, step, torch

from deltawire.chain.reader_options import ReaderOptions
from deltawire.delta.prepared import PreparedUpdate
from deltawire.engines import HotSwap, ModuleEngine
from deltawire.engines.weights.host_copy import HostCopyUpdate, HostCopyWeights
from deltawire.events import Event
from deltawire.publish import Publisher
from deltawire.publish.writer_options import WriterOptions
from deltawire.store.memory import MemoryStore


class Run:
    """A trainer, and an engine that looks right before each commit of the trainer exists."""

    def __init__(self, publisher: Publisher, store: BeforeCommits) -> None:
        self.publisher = publisher
        self.trainer, self.served = qwen(0), qwen(1)
        self.events: list[Event] = []
        self.swap = HotSwap(store.inner, ModuleEngine(self.served), options=ReaderOptions(pin=False), on_event=self.events.append)
        publisher.publish(self.trainer.state_dict(), step=0)
        self.swap.sync()
        store.action = self.look
        self.number = 0

    def look(self) -> None:
        before = bits(self.served.state_dict())
        assert not look_and_arrive(self.swap._subscriber)
        assert bits(self.served.state_dict()) == before

    def publish(self) -> None:
        self.number += 1
        step(self.trainer, self.number)
        self.publisher.publish(self.trainer.state_dict(), step=self.number)

    def sync(self) -> dict[str, Any]:
        """Sync, and return the fields of the event."""
        assert self.swap.sync().step == self.number
        assert bits(self.served.state_dict()) == bits(self.trainer.state_dict())
        return dict([event for event in self.events if event.name == "synced"][-1].fields)


@pytest.fixture(params=["in place", "device"])
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    announce_at_once(monkeypatch)
    if request.param == "device":
        monkeypatch.setattr("deltawire.engines.module.InPlaceWeights", HostCopyWeights)
    store = BeforeCommits(MemoryStore())
    with Publisher(store, options=WriterOptions(segment_bytes=1024)) as publisher:  # tied weights lie in different segments
        made = Run(publisher, store)
        yield made
        made.swap.close()


def test_an_engine_decodes_everything_before_the_commit_and_writes_after_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[object] = []
    for kind in (PreparedUpdate, HostCopyUpdate):

        def counted(self: Any, state: Any, delta: Any, add: Callable[..., Any] = kind.add) -> Any:
            decoded.append(delta)
            return add(self, state, delta)

        monkeypatch.setattr(kind, "add", counted)
    for _ in range(3):
        run.publish()
        assert decoded
        decoded.clear()
        fields = run.sync()
        assert not decoded
        assert fields["ahead_bytes"] == fields["bytes"] > 0
    run.swap.sync(seq=2)
    run.swap.sync()
    assert bits(run.served.state_dict()) == bits(run.trainer.state_dict())


def test_parameters_that_were_replaced_after_decoding_are_written_to(run: Run) -> None:
    """The new parameters hold the same values, but the update was decoded for the old ones."""
    run.publish()
    norm = run.served.model.norm
    norm.weight = torch.nn.Parameter(norm.weight.detach().clone())
    run.sync()


@pytest.mark.parametrize("run", ["in place"], indirect=True)  # a copy on the host never sees what other code writes to the device
def test_a_weight_that_other_code_changes_after_decoding_is_noticed_before_anything_is_written(run: Run) -> None:
    run.publish()
    served, trained = (model.model.layers[0].mlp.up_proj.weight.detach().view(-1) for model in (run.served, run.trainer))
    same = int((served == trained).nonzero()[0])
    served[same] = 77.0
    run.sync()
    names = [event.name for event in run.events]
    assert "state-refused" in names
    assert "swap-failed" not in names
