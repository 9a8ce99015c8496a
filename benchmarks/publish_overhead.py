"""What publishing every step costs training: seconds per step against no publishing, on one machine that does both.

A small transformer with fp32 master weights is trained on the CPU, with as many threads as there are, so that encoding in the background
takes from training what it needs. Ways of publishing take turns of a step or a few, in an order that changes from round to round, and each
is compared with the turns of "nothing" of its own round. "Nothing" has two turns in each round: how far they differ is the noise.

A turn begins with a step that is published and not counted: what is still going on in the background at the end of a turn, uncounted, was
there at its beginning, too.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from report import Table

RATE = 1e-6
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is loaded: threads that spin while they wait count as work


@dataclass
class Way:
    """One way of publishing. `publish` is called after every step, `settle` at the end of a turn, which is not counted.

    Per turn, `turns` has the seconds per step, `work` the seconds of processor time per step, by all threads of this process, which do not
    depend on what else the machine does. `calls` has how long each call took.
    """

    name: str
    publish: Callable[[int], Any]
    settle: Callable[[], Any] = lambda: None
    turns: list[float] = field(default_factory=list)
    work: list[float] = field(default_factory=list)
    calls: list[float] = field(default_factory=list)


def measure(width: int = 512, layers: int = 6, tokens: int = 4096, steps: int = 1, rounds: int = 6) -> Table:
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
        behind = opened.enter_context(Publisher(folder / "background", background=True, attachments={}))
        within = opened.enter_context(Publisher(folder / "foreground", attachments={}))
        nothing = [Way("nothing", lambda step: None), Way("nothing, again (the noise)", lambda step: None)]
        ways = [
            Way("deltawire, in the background", lambda step: source.publish(behind, step=step), behind.flush),
            Way("deltawire, waited for", lambda step: source.publish(within, step=step)),
            Way("whole checkpoint to a file, waited for", lambda step: save_file(dict(source.snapshot()), folder / "whole.safetensors")),
        ]
        for way in ways:  # allocations, first checkpoints, the optimizer's state
            train()
            way.publish(0)
            way.settle()
        number = 0
        order = [nothing[0], *ways[:2], nothing[1], *ways[2:]]
        for round_ in range(rounds):
            shift = round_ % len(order)
            for way in order[shift:] + order[:shift]:
                number = _take_turn(way, train, number, steps)
        version, state_bytes = within.version, sum(tensor.nbytes for tensor in source.snapshot().values())
    assert version is not None
    return _table(nothing, ways, steps, state_bytes, version.bytes, version.changed)


def _take_turn(way: Way, train: Callable[[], None], number: int, steps: int) -> int:
    for step in range(steps + 1):
        if step == 1:
            start, worked = time.perf_counter(), time.process_time()
        train()
        number += 1
        called = time.perf_counter()
        way.publish(number)
        if step:
            way.calls.append(time.perf_counter() - called)
    way.turns.append((time.perf_counter() - start) / steps)
    way.work.append((time.process_time() - worked) / steps)
    way.settle()
    return number


def _table(nothing: list[Way], ways: list[Way], steps: int, state_bytes: int, version_bytes: int, changed: int) -> Table:
    import torch

    table = Table(
        "publish-overhead",
        f"Training while publishing every step: {state_bytes / 1e6:.0f} MB of bf16 weights from fp32 masters, AdamW at {RATE:g}",
        ["published", "seconds per step", "slower than nothing", "half of the rounds between", "more processor time", "training waits"],
    )
    base, base_work = _means(way.turns for way in nothing), _means(way.work for way in nothing)
    noise = _ratios(nothing[1].turns, nothing[0].turns)
    table.rows.append(["nothing", f"{statistics.median(base):.2f}", "", "", "", ""])
    for way in [nothing[1], *ways]:
        low, middle, high = statistics.quantiles(noise if way is nothing[1] else _ratios(way.turns, base), n=4)
        work = statistics.median(_ratios(way.work, nothing[0].work if way is nothing[1] else base_work))
        waits = "" if way is nothing[1] else f"{statistics.median(way.calls) * 1000:.0f} ms"
        spread = f"{low:+.1%} and {high:+.1%}"
        table.rows.append([way.name, f"{statistics.median(way.turns):.2f}", f"{middle:+.1%}", spread, f"{work:+.1%}", waits])
    more = statistics.mean(ways[0].work) - statistics.mean(base_work)
    table.notes = [
        f"Medians of {len(base)} rounds of turns of {steps} counted step(s), to a local directory; {torch.get_num_threads()} threads for "
        f"training, and as many for encoding. The last version: {version_bytes:,} bytes, "
        f"{2 * changed / state_bytes:.2%} of the weights changed.",
        f"In the background a publication takes {1e3 * more:.0f} ms of processor time (a mean; most of it for skips).",
        "So the share falls as steps get longer.",
    ]
    overhead, jitter = statistics.median(_ratios(ways[0].turns, base)), statistics.median(map(abs, noise))
    table.check(f"publishing in the background slows training by less than 5%, where the noise is ±{jitter:.1%}", overhead < 0.05)
    work = statistics.median(_ratios(ways[0].work, base_work))
    table.check("publishing in the background takes less than 5% of the processor time of training", work < 0.05)
    return table


def _means(turns: Iterable[list[float]]) -> list[float]:
    return [statistics.mean(each) for each in zip(*turns, strict=True)]


def _ratios(turns: list[float], base: list[float]) -> list[float]:
    """Round by round: what else the machine does drifts more slowly than that."""
    return [mine / theirs - 1 for mine, theirs in zip(turns, base, strict=True)]


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
