"""A member of the demo. It does the work of `deltawire member --from URL --env task:known_words`, and reports its digest at the end.

`--slowdown 4` makes every token take four times as long, as on a slower machine. With `--halt-at STEP` the member stops in the middle of a
task, while it holds the lease, as soon as it has the policy of that step. It reports this, and waits to be killed.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Sequence
from typing import Any

import task
import torch
import transformers.models.llama.modeling_llama  # noqa: F401 - imported now, while the member is idle
from child import tell, tell_event, told_to_stop

from deltawire.chain.reader_options import ReaderOptions
from deltawire.errors import DeltawireError
from deltawire.fleet.generation import Generated, Stop, never
from deltawire.fleet.member import Member
from deltawire.fleet.update_times import UpdateTimes
from deltawire.format.records.trainer_records import Sampling
from deltawire.rl.generation import TransformersGenerator
from deltawire.rl.member import RewardScorer
from deltawire.store import open_store
from deltawire.tensors.module_tensors import named_weights, tied_names
from deltawire.tensors.state import state_digest

POLL = 0.1


class PacedGenerator(TransformersGenerator):
    """Waits between forward passes, when `stop` is called. Weights are swapped as usual."""

    def __init__(self, *arguments: Any, slowdown: float = 1.0, halt_at: int | None = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._slowdown = slowdown
        self._halt_at = halt_at

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, stop: Stop = never) -> list[Generated]:
        last: float | None = None

        def between_passes() -> bool:
            nonlocal last
            if last is not None:
                time.sleep((self._slowdown - 1) * (time.monotonic() - last))
                self._halt_if_due(stop)
            last = time.monotonic()
            return stop()

        return super().generate(prompts, sampling, stop=between_passes)

    def _halt_if_due(self, stop: Stop) -> None:
        version = self.version
        if self._halt_at is not None and version is not None and (version.step or 0) >= self._halt_at:
            tell("halted")
            while not stop():
                time.sleep(POLL)

    def digest(self) -> str:
        """Return the digest of the weights that it generates with, computed from the weights themselves."""
        weights = named_weights(self.model)
        tied = tied_names(weights)
        return str(state_digest({name: tensor for name, tensor in weights.items() if name not in tied}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("name")
    parser.add_argument("--slowdown", type=float, default=1.0)
    parser.add_argument("--halt-at", type=int, default=None, metavar="STEP")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    serve(arguments.url, arguments.name, told_to_stop(), slowdown=arguments.slowdown, halt_at=arguments.halt_at)


def serve(url: str, name: str, stop: threading.Event, **pace: Any) -> None:
    scorer = RewardScorer([task.known_words])
    updates = UpdateTimes(tell_event)
    with open_store(url) as store:
        while not stop.is_set():
            try:
                generator = PacedGenerator(store, options=ReaderOptions(reader=name), poll=POLL, on_event=updates.listen, **pace)
                break
            except DeltawireError as error:  # the trainer has published nothing yet
                if not error.retryable:
                    raise
                stop.wait(POLL)
        else:
            return
        try:
            Member(store, generator, scorer, name=name, poll=POLL, updates=updates, on_event=tell_event).run(stop)
        finally:
            generator.close()
        tell("weights", digest=generator.digest())


if __name__ == "__main__":
    main()
