"""What publishing every step costs training: seconds per step against no publishing, on one machine that does both.

A small transformer with fp32 master weights is trained on the CPU, with as many threads as there are, so that encoding in the background
takes from training what it needs. Ways of publishing take turns, a few steps each, so that a busy machine disturbs all of them alike.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from report import Table

RATE = 1e-6


@dataclass
class Way:
    """One way of publishing. `publish` is called after every step, `settle` after the last of a turn, which is not counted."""

    name: str
    publish: Callable[[int], Any]
    settle: Callable[[], Any] = lambda: None
    turns: list[float] = field(default_factory=list)
    calls: list[float] = field(default_factory=list)


def is_possible() -> bool:
    """Whether there is anything to train with."""
    try:
        import safetensors.torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError:
        return False
    return True


def measure(width: int = 512, layers: int = 6, tokens: int = 1024, steps: int = 4, turns: int = 4) -> Table:
    import torch
    from safetensors.torch import save_file

    from deltawire import Publisher
    from deltawire.trainers import WeightSource

    torch.manual_seed(0)
    model, batch = _model(width, layers), torch.randint(0, 4096, (tokens // 128, 128))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    source = WeightSource(model, dtype=torch.bfloat16)

    def train() -> None:
        model(batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        behind = opened.enter_context(Publisher(folder / "background", background=True))
        within = opened.enter_context(Publisher(folder / "foreground"))
        ways = [
            Way("nothing", lambda step: None),
            Way("deltawire, in the background", lambda step: source.publish(behind, step=step), behind.flush),
            Way("deltawire, waited for", lambda step: source.publish(within, step=step)),
            Way("whole checkpoint to a file, waited for", lambda step: save_file(dict(source.snapshot()), folder / "whole.safetensors")),
        ]
        for way in ways:  # allocations, first checkpoints, the optimizer's state
            train()
            way.publish(0)
            way.settle()
        number = 0
        for _ in range(turns):
            for way in ways:
                number = _take_turn(way, train, number, steps)
        version, state_bytes = within.version, sum(tensor.nbytes for tensor in source.snapshot().values())
    assert version is not None
    return _table(ways, steps, state_bytes, version.bytes, version.changed)


def _take_turn(way: Way, train: Callable[[], None], number: int, steps: int) -> int:
    start = time.perf_counter()
    for _ in range(steps):
        train()
        number += 1
        called = time.perf_counter()
        way.publish(number)
        way.calls.append(time.perf_counter() - called)
    way.turns.append((time.perf_counter() - start) / steps)
    way.settle()
    return number


def _table(ways: list[Way], steps: int, state_bytes: int, version_bytes: int, changed: int) -> Table:
    import torch

    table = Table(
        "publish-overhead",
        f"Training while publishing every step: {state_bytes / 1e6:.0f} MB of bf16 weights from fp32 masters, AdamW at {RATE:g}",
        ["published", "seconds per step", "slower than nothing", "training waits"],
    )
    none = ways[0]
    for way in ways:
        # Turn by turn against the turn of "nothing" beside it: what else the machine does drifts more slowly than that.
        overhead = statistics.median(mine / base - 1 for mine, base in zip(way.turns, none.turns, strict=True))
        table.rows.append(
            [
                way.name,
                f"{statistics.median(way.turns):.2f}",
                "" if way is none else f"{overhead:+.1%}",
                "" if way is none else f"{statistics.median(way.calls) * 1000:.0f} ms",
            ]
        )
    table.notes = [
        f"Medians of {len(none.turns)} turns of {steps} steps, to a local directory; {torch.get_num_threads()} threads for training, "
        f"and as many for encoding. The last version: {version_bytes:,} bytes, {2 * changed / state_bytes:.2%} of the weights changed.",
    ]
    background = ways[1]
    overhead = statistics.median(mine / base - 1 for mine, base in zip(background.turns, none.turns, strict=True))
    table.check("publishing in the background slows training by less than 5%", overhead < 0.05)
    return table


def _model(width: int, layers: int) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(
        Qwen3Config(
            hidden_size=width,
            intermediate_size=3 * width,
            num_hidden_layers=layers,
            num_attention_heads=width // 64,
            num_key_value_heads=width // 64,
            head_dim=64,
            vocab_size=4096,
            tie_word_embeddings=True,
        )
    )
