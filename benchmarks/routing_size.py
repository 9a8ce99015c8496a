"""Bytes and time of recorded routing: the routed experts of two shapes of models, by routers of small models made here.

    python benchmarks/run.py routing

The small models have the routers of Qwen3-30B-A3B (8 of 128 experts) and of DeepSeek-V3 (8 of 256, from 4 of 8 groups), and few, narrow
layers. They are trained for some steps on the text of this repository, or have random weights. Bytes per token are those of the layers
that the large models have: 48 and 58.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
from report import ROOT, Table

from deltawire.chain.version import Version
from deltawire.codec import using_codec
from deltawire.format.records.trainer_records import Sampling
from deltawire.format.routing import Routing, RoutingLayout, Sequences

_WINDOW = 512
_SIZES: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
}


def text_ids() -> Any:
    """Return the text of this repository as token ids."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    files = [*(ROOT / "docs").glob("*.md"), *(ROOT / "src").rglob("*.py")]
    texts = [path.read_text(encoding="utf-8") for path in sorted(files)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=_SIZES["vocab_size"], show_progress=False))
    return np.array([token for text in texts[:: max(1, len(texts) // 80)] for token in tokenizer.encode(text).ids])


def build(kind: str, ids: Any, steps: int) -> Any:
    """Return a model: with random weights whose scale is that of trained ones, or trained for some steps."""
    import torch
    import transformers

    torch.manual_seed(0)
    if kind == "qwen3":
        config = transformers.Qwen3MoeConfig(
            **_SIZES, head_dim=32, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=16, output_router_logits=steps > 0
        )
        model: Any = transformers.Qwen3MoeForCausalLM(config)
    else:
        config = transformers.DeepseekV3Config(
            **_SIZES,
            n_routed_experts=256,
            num_experts_per_tok=8,
            n_group=8,
            topk_group=4,
            n_shared_experts=1,
            moe_intermediate_size=8,
            first_k_dense_replace=1,
            q_lora_rank=64,
            kv_lora_rank=64,
            qk_nope_head_dim=32,
            qk_rope_head_dim=16,
            v_head_dim=32,
        )
        model = transformers.DeepseekV3ForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.normal_(0, 1.0 if "embed" in name and not steps else weight.shape[-1] ** -0.5)
    chance = np.random.default_rng(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        rows = torch.from_numpy(np.stack([ids[start : start + 128] for start in chance.integers(0, len(ids) - 128, 4)]))
        model(rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.config.output_router_logits = False
    return model.eval()


def record(model: Any, ids: Any, windows: int) -> tuple[Any, Any, tuple[int, ...]]:
    """Return tokens [windows, tokens] and their experts [windows, tokens, layers, top k], and the layers."""
    import torch

    from deltawire.rl.routing.router_replay import RouterReplay

    chance = np.random.default_rng(2)
    tokens = np.stack([ids[start : start + _WINDOW] for start in chance.integers(0, len(ids) - _WINDOW, windows)])
    with RouterReplay(model) as replay, replay.record() as recording, torch.no_grad():
        for row in tokens:
            model(torch.from_numpy(row[None]))
        experts = recording.take()
        return tokens, experts.reshape(windows, _WINDOW, *experts.shape[1:]), replay.layers


def fastest(work: Callable[[], Any], clock: Callable[[], float], tries: int = 9, pause: float = 0.0) -> float:
    """Return the shortest time that work takes by a clock. After a pause, a busy machine gives more time at once."""
    times = []
    for _ in range(tries):
        time.sleep(pause)
        start = clock()
        work()
        times.append(clock() - start)
    return min(times)


def add(table: Table, label: str, tokens: Any, experts: Any, count: int, layers: int) -> tuple[float, float, float]:
    """Add a row about experts, as those of a model with so many layers. Return bytes by bytes of ids, and GB/s with 1 and 2 threads."""
    import zstandard

    whole = np.tile(experts, (1, 1, -(-layers // experts.shape[2]), 1))[:, :, :layers].astype(np.int16)
    layout = RoutingLayout(count, whole.shape[-1], tuple(range(layers)))
    prompts = [row[:64].astype(np.int32) for row in tokens]
    sequences = Sequences.of(prompts, [(number, row[64:].astype(np.int32)) for number, row in enumerate(tokens)])
    raw = whole.size * (1 if count <= 256 else 2)
    routing = Routing.encode(layout, sequences, list(whole))
    assert np.array_equal(np.concatenate(routing.experts()), np.sort(whole, -1).reshape(-1, layers, layout.top_k)), "not exact"
    encoding = fastest(lambda: Routing.encode(layout, sequences, list(whole)), time.process_time, 3)
    one = fastest(lambda: routing.experts(threads=1), time.process_time)
    two = fastest(lambda: routing.experts(threads=2), time.perf_counter, 40, 0.02)
    tokens_made = len(sequences.tokens)
    own = np.sort(experts, -1).astype(np.uint8)  # repeated layers would help zstd, so it gets those that the small model has
    sizes, peers = [], [fastest(lambda: own.astype(np.int16), time.process_time)]
    for level in (1, 3):
        packed = zstandard.ZstdCompressor(level=level).compress(own.tobytes())
        sizes.append(len(packed) / tokens_made * layers / experts.shape[2])

        def unpack(packed: bytes = packed) -> Any:
            return np.frombuffer(zstandard.ZstdDecompressor().decompress(packed), np.uint8).astype(np.int16)

        peers.append(fastest(unpack, time.process_time))
    sets = layers * math.log2(math.comb(count, layout.top_k)) / 8
    sizes = [raw / tokens_made, sets, *sizes, routing.nbytes / tokens_made]
    speeds = [raw / encoding / 1e9, *(own.size / peer / 1e9 for peer in peers), raw / one / 1e9, raw / two / 1e9]
    table.rows.append([label, *(f"{size:,.0f}" for size in sizes), f"{routing.nbytes / raw:.0%}", *(f"{speed:.2f}" for speed in speeds)])
    return routing.nbytes / raw, speeds[-2], speeds[-1]


def recording_cost(model: Any, ids: Any, tokens: int) -> float:
    """Return how much longer generation takes with a recorder, in CPU time: the median of five ratios."""
    from deltawire.rl.routing.routing_recorder import RoutingRecorder
    from deltawire.rl.sampling import sample

    @contextlib.contextmanager
    def one_pass() -> Iterator[Version]:
        version: Any = SimpleNamespace(seq=1)
        yield version

    prompts = [ids[start : start + 32].tolist() for start in range(0, 8 * 32, 32)]
    ratios = []
    for _ in range(5):
        times = []
        for recorder in (None, RoutingRecorder(model)):
            start = time.process_time()
            sample(model, prompts, Sampling(1, tokens), forward_pass=one_pass, recorder=recorder)
            times.append(time.process_time() - start)
            if recorder is not None:
                recorder.close()
        ratios.append(times[1] / times[0])
    return statistics.median(ratios)


def measure(steps: int = 60, windows: int = 16) -> Table:
    table = Table(
        "routing-size",
        "Recorded routing: bytes per token, and GB/s of raw ids",
        [
            *("router", "raw ids", "as sets", "zstd -1", "zstd -3", "deltawire", "of raw"),
            *("encode", "decode: raw", "zstd -1", "zstd -3", "deltawire", "two threads"),
        ],
    )
    load = os.getloadavg()[0]
    ids = text_ids()
    results = []
    for kind, name, count, layers in (("qwen3", "Qwen3-30B: 48 × 8 of 128", 128, 48), ("deepseek", "DeepSeek-V3: 58 × 8 of 256", 256, 58)):
        for trained in (0, steps):
            model = build(kind, ids, trained)
            tokens, experts, _ = record(model, ids, windows)
            results.append(
                add(table, f"{name}, {f'trained {steps} steps' if trained else 'random weights'}", tokens, experts, count, layers)
            )
            if kind == "qwen3" and trained:
                cost = recording_cost(model, ids, 48 if steps > 10 else 8)
    chance = np.random.default_rng(3)
    noise = np.argsort(chance.random((windows, _WINDOW, 6, 128)), -1)[..., :8]
    worst = add(table, "noise: any 8 of 128, 48 layers", tokens, noise, 128, 48)
    with using_codec("scalar"):
        portable = add(table, "the same, portable code", tokens, noise, 128, 48)
    table.notes += [
        "Raw ids take one byte each. "
        "“As sets” is the bound for sets of experts that have nothing to do with each other: log₂ of the number of sets.",
        "zstd compresses the ids of the layers that the small model has, in rows that were sorted.",
        "Decoding gives 16-bit ids in every column; from raw ids it is a conversion. "
        "Speeds are those of CPU time, and those of two threads of elapsed time. "
        f"The machine has {os.cpu_count()} cores; its load was {load:.1f} before and {os.getloadavg()[0]:.1f} after this benchmark.",
        f"Recording makes generation with transformers on the CPU take {cost:.2f} times as long (model of 7 layers, 8 rows).",
    ]
    table.check("routers take at most two thirds of the bytes of raw ids", max(share for share, *_ in results) < 2 / 3)
    table.check("noise takes at most 6% more than its bound", worst[0] * 384 <= 1.06 * 48 * math.log2(math.comb(128, 8)) / 8)
    table.check("1 GB/s of routers' raw ids are decoded by two threads", min(speed for *_, speed in results) >= 1)
    table.check("1 GB/s of noise, too, and by portable code", min(worst[2], portable[2]) >= 1)
    return table
