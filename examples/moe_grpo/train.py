"""Trains a mixture of experts by GRPO on the rollouts of a fleet, and replays the experts that the members recorded."""

from __future__ import annotations

import copy
import time
from collections import defaultdict
from pathlib import Path

import torch
from low_words import ROWS
from transformers import AutoModelForCausalLM, AutoTokenizer

from deltawire.chain.reader_options import ReaderOptions
from deltawire.events import Event
from deltawire.fleet.options import FleetOptions
from deltawire.fleet.overview import FleetReader
from deltawire.fleet.rules.scheduler import Scheduler
from deltawire.rl import GrpoSettings, GrpoTrainer
from deltawire.store import open_store

SETTINGS = GrpoSettings(
    prompts=8, num_generations=8, tasks=4, max_completion_length=16, learning_rate=1e-3, max_staleness=1, router_replay=True
)
FLEET = FleetOptions(poll_seconds=0.1, keep_steps=64)
SCHEDULER = Scheduler(beta=0.5, straggler=1000.0, rest_seconds=0.5)
"""All members share the cores of one machine, so none repeats the work of a slow one, and a slow one is soon tried again."""


def train(model_folder: Path, store: str, steps: int, members: set[str]) -> Path:
    """Train for this many steps on the rollouts of these members. Return the folder of the trained model."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    options = {"settings": SETTINGS, "fleet": FLEET, "scheduler": SCHEDULER, "on_event": Progress()}
    with GrpoTrainer(model, ROWS, store, attachments=model_folder, **options) as trainer:
        wait_for_members(store, members)  # so that all of them get work from the first step on
        trainer.train(until=steps)
        wait_for_members(store, members, trainer.step)
        trainer.stop_members()
    trained = model_folder.parent / "trained"
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(trained)
    AutoTokenizer.from_pretrained(model_folder).save_pretrained(trained)
    return trained


class Progress:
    """Prints a line for each step, with the mismatch of each member whose rollouts were trained on."""

    def __init__(self) -> None:
        self._kl: dict[object, list[str]] = defaultdict(list)  # by step, because a step is told after the next one has begun

    def __call__(self, event: Event) -> None:
        fields = event.fields
        if event.name == "mismatch" and fields["by"] == "member":
            self._kl[fields["step"]].append(f"{fields['group']} {fields['kl']:.1e}")
        elif event.name == "trained" and fields["reward"] is not None:
            print(
                f"step {fields['step']}: reward {fields['reward']:.3f}, {fields['routing/replayed_ratio']:.1%} of decisions replayed, "
                f"{fields['routing/differing_ratio']:.2%} of them differ, KL {', '.join(self._kl.pop(fields['step'], []))}",
                flush=True,
            )
        elif event.name in ("rollout-rejected", "step-skipped", "waiting-for-members"):
            print(event.name, dict(fields), flush=True)


def wait_for_members(store: str, members: set[str], step: int = 0, seconds: float = 600) -> None:
    """Return when all of these members have the version of this step, or a later one."""
    deadline = time.monotonic() + seconds
    with open_store(store) as opened, FleetReader(opened, ReaderOptions().open_log(opened).run.id) as reader:
        while missing := members - {
            each.beat.member for each in reader.fleet(0).members if each.beat.step is not None and each.beat.step >= step
        }:
            if time.monotonic() > deadline:
                raise TimeoutError(f"these members do not have the policy of step {step}: {', '.join(sorted(missing))}")
            time.sleep(0.2)
