"""A whole run with a mixture of experts: members record, results travel through the store, and the trainer replays."""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from learning_run import PATIENT, ROWS, SETTINGS, low_words, tokenizer
from moe_models import moe_model
from tiny_models import bits, torch

from deltawire.chain.reader_options import ReaderOptions
from deltawire.errors import DeltawireError
from deltawire.events import Event
from deltawire.fleet.member import Member
from deltawire.rl.generation import TransformersGenerator
from deltawire.rl.member import RewardScorer
from deltawire.rl.trainer import GrpoTrainer
from deltawire.store.memory import MemoryStore


def attachments(model: Any) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer().save_pretrained(folder)
        model.config.save_pretrained(folder)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


@contextlib.contextmanager
def member(store: MemoryStore, *, routing: bool) -> Iterator[None]:
    stop = threading.Event()
    errors: list[BaseException] = []

    def serve() -> None:
        try:
            while not stop.wait(0.01):
                with contextlib.suppress(DeltawireError):  # there is no chain yet
                    generator = TransformersGenerator(store, options=ReaderOptions(reader="m"), poll=0.01, routing=routing)
                    break
            else:
                return
            with contextlib.closing(generator):
                Member(store, generator, RewardScorer([low_words]), name="m", poll=0.01).run(stop)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    assert not errors, errors


def run(*, routing: bool, router_replay: bool) -> tuple[Any, list[Event]]:
    """Train three steps. Return the bits of the trainer's weights, and the events."""
    store, events, model = MemoryStore(), [], moe_model("qwen3_moe")
    settings = replace(SETTINGS, router_replay=router_replay, learning_rate=1e-3, per_device_train_batch_size=8)
    with (
        member(store, routing=routing),
        GrpoTrainer(
            model,
            ROWS,
            store,
            settings=settings,
            fleet=PATIENT,
            attachments=attachments(model),
            dtype=torch.float32,
            on_event=events.append,
        ) as learning,
    ):
        learning.train(until=3)
    return bits(dict(model.named_parameters())), events


def steps(events: list[Event]) -> list[Any]:
    return [event.fields for event in events if event.name == "trained"]


def test_the_trainer_replays_what_members_recorded():
    plain, _ = run(routing=False, router_replay=False)
    replayed, events = run(routing=True, router_replay=True)
    assert replayed == plain  # the member has the trainer's weights in float32, so it chooses the same experts
    for step in steps(events):
        whole = 16 * 2 + step["tokens"]  # with the prompts
        assert step["routing/replayed_ratio"] == pytest.approx(1 - 16 / whole)  # the last token of each completion has no record
        assert step["routing/differing_ratio"] == 0
        assert step["routing/damaged"] == 0


def test_results_without_experts_are_trained_on_with_the_models_own():
    plain, _ = run(routing=False, router_replay=False)
    replayed, events = run(routing=False, router_replay=True)
    assert replayed == plain
    assert [step["routing/replayed_ratio"] for step in steps(events)] == [0, 0, 0]
