"""The trainer and the members of rl_async.py, which starts them with examples/demo on the path. They print events as lines of JSON."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import task
import torch
from emulated_link import EmulatedLink
from equal_shares import EqualShares
from train import SETTINGS, model_files
from transformers import LlamaForCausalLM

from deltawire.chain.reader_options import ReaderOptions
from deltawire.errors import DeltawireError
from deltawire.events import Event
from deltawire.fleet.generation import Generated, Stop, never
from deltawire.fleet.member import Member
from deltawire.fleet.options import FleetOptions
from deltawire.fleet.rules.scheduler import Scheduler
from deltawire.format.records.trainer_records import Sampling
from deltawire.publish.append import Appender
from deltawire.publish.writer_options import WriterOptions
from deltawire.rl.generation import TransformersGenerator
from deltawire.rl.member import RewardScorer
from deltawire.rl.trainer import GrpoTrainer
from deltawire.store import Store, open_store

POLL = 0.05


class HeldGenerator(TransformersGenerator):
    """Generates at most `rate` tokens per second, so that members have a known speed whatever the load on this machine."""

    rate = float("inf")

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, stop: Stop = never) -> list[Generated]:
        start = time.monotonic()
        made = super().generate(prompts, sampling, stop=stop)
        time.sleep(max(0.0, start + sum(len(one.tokens) for one in made) / self.rate - time.monotonic()))
        return made


def tell(event: Event) -> None:
    print(json.dumps({**event.to_json(), "at": time.time()}), flush=True)


def linked(settings: dict[str, Any]) -> Store:
    return EmulatedLink(open_store(settings["store"]), latency=settings["latency"], bandwidth=settings["bandwidth"])


def train(settings: dict[str, Any]) -> None:
    if settings["full"]:  # every version is a full checkpoint, as without deltas
        Appender._delta = lambda *_: None  # type: ignore[method-assign, assignment, return-value]
    folder = Path(settings["model"])
    with GrpoTrainer(
        LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32),
        task.rows(),
        linked(settings),
        settings=replace(SETTINGS, max_staleness=settings["staleness"], prompts=settings["prompts"], tasks=settings["prompts"]),
        attachments=model_files(folder),
        fleet=FleetOptions(lease_seconds=30, poll_seconds=POLL),
        scheduler=EqualShares() if settings["equal"] else Scheduler(),
        on_event=tell,
        options=WriterOptions(skips=not settings["full"]),
    ) as trainer:
        trainer.train(until=1)  # everything is warm from here on
        start = time.monotonic()
        trainer.train(until=10**6, stop=lambda: time.monotonic() - start > settings["seconds"])
        trainer.stop_members()


def serve(settings: dict[str, Any]) -> None:
    store, stop, generator = linked(settings), threading.Event(), None
    while generator is None:
        try:
            generator = HeldGenerator(store, options=ReaderOptions(reader=settings["name"]), poll=POLL, on_event=tell)
        except DeltawireError as error:  # the trainer has not published yet
            if not error.retryable:
                raise
            time.sleep(POLL)
    generator.rate = settings["rate"]
    Member(store, generator, RewardScorer([task.known_words]), name=settings["name"], poll=POLL, on_event=tell).run(stop)
    generator.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"trainer": train, "member": serve}[sys.argv[1]](json.loads(sys.argv[2]))
