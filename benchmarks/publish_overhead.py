"""Measure how much publishing every step slows training, in seconds per step, on one machine that does both.

The benchmark trains a small transformer with fp32 master weights on all cores of the CPU, so that encoding in the background competes with
training. The methods of publishing take turns of one or a few steps, in an order that changes from round to round. Each is compared with
the turns of "nothing" in the same round. "Nothing" has two turns in each round, and their difference is the noise.

A turn begins with a step that is published but not counted. So background work at the end of a turn, which is not counted, is balanced by
background work at its beginning.
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
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # set before torch is loaded, because threads that spin while they wait count as work


@dataclass
class Method:
    """One method of publishing. `publish` is called after every step, and `settle` at the end of a turn, which is not counted.

    For each turn, `turns` holds the seconds per step, and `work` the processor time per step of all threads of this process, which does not
    depend on other load. `calls` holds the duration of each call of `publish`.
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
        nothing = [Method("nothing", lambda step: None), Method("nothing, a second time (the noise)", lambda step: None)]
        methods = [
            Method("deltawire, in the background", lambda step: source.publish(behind, step=step), behind.flush),
            Method("deltawire, waited for", lambda step: source.publish(within, step=step)),
            Method(
                "full checkpoint to a file, in the foreground",
                lambda step: save_file(dict(source.snapshot()), folder / "whole.safetensors"),
            ),
        ]
        for method in methods:  # for allocations, first checkpoints and the optimizer's state
            train()
            method.publish(0)
            method.settle()
        number = 0
        order = [nothing[0], *methods[:2], nothing[1], *methods[2:]]
        for round_ in range(rounds):
            shift = round_ % len(order)
            for method in order[shift:] + order[:shift]:
                number = _take_turn(method, train, number, steps)
        version, state_bytes = within.version, sum(tensor.nbytes for tensor in source.snapshot().values())
    assert version is not None
    return _table(nothing, methods, steps, state_bytes, version.bytes, version.changed)


def _take_turn(method: Method, train: Callable[[], None], number: int, steps: int) -> int:
    for step in range(steps + 1):
        if step == 1:
            start, worked = time.perf_counter(), time.process_time()
        train()
        number += 1
        called = time.perf_counter()
        method.publish(number)
        if step:
            method.calls.append(time.perf_counter() - called)
    method.turns.append((time.perf_counter() - start) / steps)
    method.work.append((time.process_time() - worked) / steps)
    method.settle()
    return number


def _table(nothing: list[Method], methods: list[Method], steps: int, state_bytes: int, version_bytes: int, changed: int) -> Table:
    import torch

    table = Table(
        "publish-overhead",
        f"Training while publishing every step: {state_bytes / 1e6:.0f} MB of bf16 weights from fp32 master weights, AdamW at {RATE:g}",
        ["published", "seconds per step", "slower than nothing", "half of the rounds between", "more processor time", "training waits"],
    )
    base, base_work = _means(method.turns for method in nothing), _means(method.work for method in nothing)
    noise = _ratios(nothing[1].turns, nothing[0].turns)
    table.rows.append(["nothing", f"{statistics.median(base):.2f}", "", "", "", ""])
    for method in [nothing[1], *methods]:
        low, middle, high = statistics.quantiles(noise if method is nothing[1] else _ratios(method.turns, base), n=4)
        work = statistics.median(_ratios(method.work, nothing[0].work if method is nothing[1] else base_work))
        waits = "" if method is nothing[1] else f"{statistics.median(method.calls) * 1000:.0f} ms"
        spread = f"{low:+.1%} and {high:+.1%}"
        table.rows.append([method.name, f"{statistics.median(method.turns):.2f}", f"{middle:+.1%}", spread, f"{work:+.1%}", waits])
    more = statistics.mean(methods[0].work) - statistics.mean(base_work)
    table.notes = [
        f"Medians of {len(base)} rounds of turns of {steps} counted step(s), to a local directory; {torch.get_num_threads()} threads for "
        f"training, and as many for encoding. The last version: {version_bytes:,} bytes, "
        f"{2 * changed / state_bytes:.2%} of the weights changed.",
        f"A publication in the background takes {1e3 * more:.0f} ms of processor time on average, most of it for skips, "
        "so its share falls as steps get longer.",
    ]
    overhead, jitter = statistics.median(_ratios(methods[0].turns, base)), statistics.median(map(abs, noise))
    table.check(f"publishing in the background slows training by less than 5%, where the noise is ±{jitter:.1%}", overhead < 0.05)
    work = statistics.median(_ratios(methods[0].work, base_work))
    table.check("publishing in the background takes less than 5% of the processor time of training", work < 0.05)
    return table


def _means(turns: Iterable[list[float]]) -> list[float]:
    return [statistics.mean(each) for each in zip(*turns, strict=True)]


def _ratios(turns: list[float], base: list[float]) -> list[float]:
    """Compare within each round, because the other load on the machine changes more slowly."""
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
