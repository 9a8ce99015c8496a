"""A trainer for the demo's task: GRPO with all members that follow URL. It prints every event as a line of JSON.

Run `python examples/demo/train.py MODEL URL --until 100`, and in other terminals, any number of times:
`cd examples/demo && deltawire member --from URL --env task:known_words`
"""

from __future__ import annotations

import argparse
import json
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import task
import torch
from transformers import LlamaForCausalLM

from deltawire.events import Event
from deltawire.fleet.options import FleetOptions
from deltawire.rl.settings import GrpoSettings
from deltawire.rl.trainer import GrpoTrainer

SETTINGS = GrpoSettings(
    prompts=6, num_generations=8, tasks=6, max_completion_length=24, learning_rate=1e-5, warmup_steps=10, max_staleness=1, save_steps=20
)
FLEET = FleetOptions(lease_seconds=5, poll_seconds=0.1, keep_steps=24)


def model_files(folder: Path) -> dict[str, bytes]:
    """Return the files that members need besides the weights."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix == ".json"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="the directory that policy.py wrote")
    parser.add_argument("url")
    parser.add_argument("--until", type=int, default=10**6, help="the last step")
    parser.add_argument("--seconds", type=float, default=None, help="the longest time")
    parser.add_argument("--staleness", type=int, default=SETTINGS.max_staleness, help="0 is synchronous")
    parser.add_argument("--checkpoints", type=Path, default=None)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    model = LlamaForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    start = time.monotonic()

    def is_over() -> bool:
        return stop.is_set() or (arguments.seconds is not None and time.monotonic() - start > arguments.seconds)

    def tell(event: Event) -> None:
        print(json.dumps({**event.to_json(), "at": time.monotonic() - start}), flush=True)

    with GrpoTrainer(
        model,
        task.rows(),
        arguments.url,
        settings=replace(SETTINGS, max_staleness=arguments.staleness),
        checkpoints=arguments.checkpoints,
        attachments=model_files(arguments.model),
        fleet=FLEET,
        on_event=tell,
    ) as trainer:
        trainer.train(until=arguments.until, stop=is_over)
        trainer.stop_members()


if __name__ == "__main__":
    main()
