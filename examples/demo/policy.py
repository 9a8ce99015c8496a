"""The demo's policy: a Llama model of 2 million weights that was trained on deltawire's documentation for half a minute.

`python examples/demo/policy.py OUT [--seconds 30]` writes it as an ordinary checkpoint directory.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import task
import torch
from transformers import LlamaConfig, LlamaForCausalLM

WIDTH, LAYERS = 192, 4
ROWS, COLUMNS = 24, 96
LEARNING_RATE = 2e-3
STEPS_PER_SECOND = 3.5
"""The speed of two cores. On a busy machine pre-training takes longer, because a model must know some words to get a reward."""


def new_model(seed: int = 0) -> Any:
    """Return a model with random weights of scale 1/√width."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=len(task.LETTERS),
        max_position_embeddings=256,
        initializer_range=WIDTH**-0.5,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


def pretrain(model: Any, seconds: float, on_progress: Callable[[float, float], object] = lambda share, loss: None) -> float:
    """Train the model on the documentation, letter by letter, and return the last loss in nats per letter.

    Parameters
    ----------
    model
        The model.
    seconds
        The time that this takes on two free cores.
    on_progress
        Called with the share that is done and the loss after each step.
    """
    letters = torch.tensor(task.tokenizer()(task.text())["input_ids"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)

    def batch_loss() -> torch.Tensor:
        starts = torch.randint(0, len(letters) - COLUMNS, (ROWS,))
        batch = torch.stack([letters[start : start + COLUMNS] for start in starts.tolist()])
        loss: torch.Tensor = model(input_ids=batch, labels=batch).loss
        return loss

    start, step, loss = time.monotonic(), 0, torch.tensor(0.0)
    torch.set_num_threads(_fastest(lambda: batch_loss().backward()))
    while (share := min((time.monotonic() - start) / seconds, step / (STEPS_PER_SECOND * seconds))) < 1:
        step += 1
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, step / 20) * (1 - 0.95 * share)
        loss = batch_loss()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        on_progress(share, loss.item())
    return loss.item()


def _fastest(work: Callable[[], object]) -> int:
    """Return the faster number of threads: one, or one per core. On a busy machine, one thread can be faster."""
    seconds = {}
    for threads in {1, os.cpu_count() or 1}:
        torch.set_num_threads(threads)
        work()
        start = time.monotonic()
        work()
        seconds[threads] = time.monotonic() - start
    return min(seconds, key=seconds.__getitem__)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=30.0)
    arguments = parser.parse_args()
    model = new_model()
    loss = pretrain(model, arguments.seconds)
    model.save_pretrained(arguments.out)
    task.tokenizer().save_pretrained(arguments.out)
    print(f"{sum(weight.numel() for weight in model.parameters()):,} weights, loss {loss:.2f} nats per letter: {arguments.out}")


if __name__ == "__main__":
    main()
