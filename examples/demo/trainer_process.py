"""The demo's trainer: it makes a model, trains it on the documentation, trains it by GRPO with the fleet, and reports its last digest."""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import policy
import task
import torch
from child import tell, tell_event, told_to_stop
from train import FLEET, SETTINGS, model_files

from deltawire import Subscriber
from deltawire.chain.reader_options import ReaderOptions
from deltawire.quantise import QuantisedLayout, dequantise_state, quantise_state
from deltawire.rl.trainer import GrpoTrainer
from deltawire.tensors.state import state_digest
from deltawire.trainers import WeightSource

PATIENCE = 120.0
"""Members have this many seconds to load the newest version."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--pretraining", type=float, required=True, metavar="SECONDS")
    parser.add_argument("--members", type=int, required=True, help="the number of members that should be there at the end")
    parser.add_argument("--quantise", default=None, metavar="RECIPE")
    arguments = parser.parse_args()
    stop = told_to_stop()
    model = policy.new_model()
    weights = sum(weight.numel() for weight in model.parameters())
    tell("model", weights=weights, state_bytes=2 * weights, reward=task.known_words.__name__)
    policy.pretrain(model, arguments.pretraining, _progress())
    torch.set_num_threads(1)  # members run from now on, too
    with GrpoTrainer(
        model,
        task.rows(),
        arguments.url,
        settings=SETTINGS,
        attachments=_attachments(model),
        fleet=FLEET,
        quantise=arguments.quantise,
        on_event=tell_event,
    ) as trainer:
        _wait_for_members(trainer, arguments.members, stop)  # otherwise the first member would do all the work on a busy machine
        trainer.train(until=arguments.steps, stop=stop.is_set)
        if trainer.step == arguments.steps:
            _wait_for_members(trainer, arguments.members, stop)
        if trainer.step == arguments.steps:
            digest, published = _digests(model, arguments.url, arguments.quantise)
            tell("finished", step=trainer.step, digest=digest, published=published)
        trainer.stop_members()


def _digests(model: Any, url: str, recipe: str | None) -> tuple[str, str]:
    """Return the digest of the trainer's weights, and that of the newest version in the store, both computed from the weights themselves.

    A quantised version is compared as members serve it: dequantised. The trainer's weights are quantised once more for this. Scales depend
    on earlier versions, so those of the newest version are used.
    """
    with Subscriber(url, options=ReaderOptions(pin=False)) as subscriber:
        subscriber.sync()
        published = subscriber.state
        if recipe is None:
            own = WeightSource(model, dtype=torch.bfloat16).snapshot()
        else:
            weights = WeightSource(model).snapshot()
            layout = QuantisedLayout.of_state(recipe, weights)
            quantised = quantise_state(weights, recipe, previous=published)
            own, published = (dequantise_state(state, layout, "bfloat16") for state in (quantised, published))
        return str(state_digest(own)), str(state_digest(published))


def _progress() -> Any:
    last = 0.0

    def on_progress(share: float, loss: float) -> None:
        nonlocal last
        if time.monotonic() - last > 0.5:
            last = time.monotonic()
            tell("pretraining", share=share, loss=loss)

    return on_progress


def _attachments(model: Any) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory(prefix="deltawire-demo-") as folder:
        model.config.save_pretrained(folder)
        task.tokenizer().save_pretrained(folder)
        return model_files(Path(folder))


def _wait_for_members(trainer: GrpoTrainer, count: int, stop: threading.Event) -> None:
    """Wait until this many members have the newest version, or patience ends. The proof at the end shows which members do not have it."""
    deadline = time.monotonic() + PATIENCE
    while not stop.wait(0.1) and time.monotonic() < deadline:
        trainer.coordinator.poll()
        alive = [member for member in trainer.coordinator.members() if member.alive]
        if len(alive) >= count and all(member.seq == trainer.version.seq for member in alive):
            return


if __name__ == "__main__":
    main()
