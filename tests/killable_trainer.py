"""A training run as a process that can be killed. It continues from its newest checkpoint, and publishes every step.

    python killable_trainer.py MODEL_DIR STORE CHECKPOINTS STEPS [CALL]

With CALL, it kills itself by SIGKILL just before that call of the store. Training is deterministic: the weights after a step are those of
an uninterrupted run.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from deltawire import Publisher
from deltawire.publish.writer_options import WriterOptions
from deltawire.rl.checkpoints import TrainerCheckpoints
from deltawire.store import Store, open_store
from deltawire.testing import Before, Call, FaultyStore
from deltawire.trainers import WeightSource

CHECKPOINT_EVERY = 3
"""The number of steps between checkpoints. It is above 1, so that the chain is ahead of the checkpoint most of the time."""

Bits = Mapping[str, torch.Tensor]


def train(
    model_dir: Path, store: Store, checkpoints: Path, steps: int, after: Callable[[int, Bits], Any] = lambda step, weights: None
) -> None:
    """Train up to a step. `after` gets the weights of each step as they are published."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_dir), dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    saved = TrainerCheckpoints(checkpoints)
    done = saved.load_newest(model, optimizer) or 0
    source = WeightSource(model, dtype=torch.bfloat16)
    files = {path.name: path for path in model_dir.iterdir() if path.suffix == ".json"}
    with Publisher(store, background=True, attachments=files, options=WriterOptions(threads=1, segment_bytes=1 << 14)) as publisher:
        for step in range(done, steps + 1):
            if step > done:
                batch = torch.randint(0, model.config.vocab_size, (2, 8), generator=torch.Generator().manual_seed(step))
                model(batch, labels=batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            after(step, source.snapshot())
            source.publish(publisher, step=step)
            publisher.flush()  # without this, a slow store would make the publisher skip steps
            if step % CHECKPOINT_EVERY == 0:
                saved.save(step, model, optimizer)


def die_at(call: int) -> Callable[[Call], bool]:
    def strikes(this: Call) -> bool:
        if this.index == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return False

    return strikes


if __name__ == "__main__":
    store = open_store(sys.argv[2])
    if len(sys.argv) > 5:
        store = FaultyStore(store, [Before(die_at(int(sys.argv[5])), "crash")])
    train(Path(sys.argv[1]), store, Path(sys.argv[3]), int(sys.argv[4]))
