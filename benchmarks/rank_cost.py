"""Compute what an update of a trillion weights takes on 8 hosts of 8 GPUs, from measurements on one GPU.

    python benchmarks/rank_cost.py

The model is like Kimi K2: 61 layers, 384 experts, fp8 with a scale for each block of 128 × 128. Each rank has six experts of every layer.
All other weights are divided over the eight ranks of a host. Which blocks of which files a rank decodes follows from the rules of the
format: files have whole tensors in the order of names (`cut_segments`), and payloads have blocks of elements of one type (docs/format.md).

Rates of decoding are those of `results/gpu-codec.json`. Times of a swap and of a paced staging are those of fp8 weights in a vLLM
server (`results/gpu-engine.json`). The size of the delta is that of `results/step-cost.json`. `ASSUMED` has what was not measured.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from dataclasses import dataclass

from report import RESULTS, Table

from deltawire.delta.windows import near_tensors
from deltawire.dtypes import DType, dtype_named, payload_type
from deltawire.publish.upload.segments import cut_segments

RANKS, RANKS_OF_A_HOST = 64, 8
_LAYERS, _EXPERTS, _HIDDEN, _INNER, _VOCABULARY = 61, 384, 7168, 2048, 163_840
_TILE, _BLOCK_TILES = 16_384, {4: 4096, 8: 2048}
"""Elements of a tile, and tiles of a block by the bits of an element; 1,024 for others (docs/format.md §5)."""
_WINDOW = 256 << 20
_LOOKED_AT = (0, 3, 7, 20, 63)
"""The ranks that are computed. Experts of other ranks are between these in the order of names."""


@dataclass(frozen=True)
class Assumed:
    """Numbers that were not measured."""

    link: float = 5e9
    """Bytes per second from the store to a host."""
    hashing: float = 2e9
    """Bytes per second that a worker maps and hashes, with one thread."""
    peers: float = 200e9
    """Bytes per second from the memory of other GPUs of the host, over NVLink."""
    host_copies: float = 25e9
    """Bytes per second from the host to a GPU, while all GPUs of the host copy."""
    agreement_ms: float = 1.0
    """Time of two messages among 64 ranks."""
    step_ms: float = 30.0
    """Time of a step of the model."""


ASSUMED = Assumed()


@dataclass(frozen=True)
class Share:
    """The bytes of one rank. They are bytes of weights, except those of the delta."""

    held: int
    decoded: int
    """Weights of blocks with at least one element of this rank."""
    own: int
    """Weights among them that the rank holds itself."""
    from_peers: int
    from_host: int
    read: int
    """The weights of files with at least one tensor of this rank. The delta files are smaller by the ratio of the step."""
    files: int
    calls: int
    """Calls of the codec. Each decodes blocks of one file that follow one another, of at most `_WINDOW` bytes."""


def tensors() -> dict[str, tuple[DType, tuple[int, ...]]]:
    """Return the types and shapes of all tensors, in the order of names."""
    e4m3, bf16, f32 = (dtype_named(name) for name in ("F8_E4M3", "BF16", "F32"))
    found: dict[str, tuple[DType, tuple[int, ...]]] = {}

    def add(name: str, rows: int, columns: int) -> None:
        found[f"{name}.weight"] = e4m3, (rows, columns)
        found[f"{name}.weight_scale_inv"] = f32, (-(-rows // 128), -(-columns // 128))

    for name in ("model.embed_tokens", "lm_head"):
        found[f"{name}.weight"] = bf16, (_VOCABULARY, _HIDDEN)
    found["model.norm.weight"] = bf16, (_HIDDEN,)
    for layer in range(_LAYERS):
        prefix = f"model.layers.{layer}."
        add(f"{prefix}self_attn.q_a_proj", 1536, _HIDDEN)
        add(f"{prefix}self_attn.q_b_proj", 64 * 192, 1536)
        add(f"{prefix}self_attn.kv_a_proj_with_mqa", 576, _HIDDEN)
        add(f"{prefix}self_attn.kv_b_proj", 64 * 256, 512)
        add(f"{prefix}self_attn.o_proj", _HIDDEN, 64 * 128)
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{prefix}{name}.weight"] = bf16, (_HIDDEN,)
        places = [("mlp", 18_432)]
        if layer:
            found[f"{prefix}mlp.gate.weight"] = bf16, (_EXPERTS, _HIDDEN)
            places = [("mlp.shared_experts", _INNER), *((f"mlp.experts.{number}", _INNER) for number in range(_EXPERTS))]
        for place, width in places:
            add(f"{prefix}{place}.gate_proj", width, _HIDDEN)
            add(f"{prefix}{place}.up_proj", width, _HIDDEN)
            add(f"{prefix}{place}.down_proj", _HIDDEN, width)
    return dict(sorted(found.items()))


def share_of(rank: int, model: dict[str, tuple[DType, tuple[int, ...]]]) -> Share:
    """Return what a rank holds, decodes and reads."""
    names, sizes = list(model), [dtype.itemsize * math.prod(shape) for dtype, shape in model.values()]
    owners = [_rank_of(name) for name in names]
    host = rank // RANKS_OF_A_HOST
    experts = sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank)
    others = sum(size for size, owner in zip(sizes, owners, strict=True) if owner is None)
    decoded = own = peers = foreign = read = files = calls = 0
    for segment in cut_segments(sizes):
        numbers = range(segment.first, segment.first + segment.count)
        if all(owners[number] not in (None, rank) for number in numbers):
            continue
        read += segment.raw
        files += 1
        groups: dict[int, list[int]] = {}
        for number in numbers:
            groups.setdefault(payload_type(names[number], model[names[number]][0]).code, []).append(number)
        for members in groups.values():
            kind = payload_type(names[members[0]], model[names[members[0]]][0])
            block = _BLOCK_TILES.get(kind.width, 1024)
            ends = list(itertools.accumulate(-(-math.prod(model[names[number]][1]) * kind.per_element // _TILE) for number in members))
            needed = {
                part
                for number, start, end in zip(members, [0, *ends], ends, strict=False)
                if owners[number] in (None, rank)
                for part in range(start // block, -(-end // block))
            }
            most = max(1, _WINDOW // (block * _TILE * kind.width // 8))
            for _, row in itertools.groupby(enumerate(sorted(needed)), key=lambda item: item[1] - item[0]):
                calls += -(-len(list(row)) // most)
            for number, start, end in zip(members, [0, *ends], ends, strict=False):
                inside = sum(
                    max(0, min(end, (part + 1) * block) - max(start, part * block))
                    for part in range(start // block, -(-end // block))
                    if part in needed
                )
                part_bytes = sizes[number] * inside // max(1, end - start)
                decoded += part_bytes
                owner = owners[number]
                if owner is None:
                    own += part_bytes // RANKS_OF_A_HOST
                    peers += part_bytes - part_bytes // RANKS_OF_A_HOST
                elif owner == rank:
                    own += part_bytes
                elif owner // RANKS_OF_A_HOST == host:
                    peers += part_bytes
                else:
                    foreign += part_bytes
    return Share(experts + others // RANKS_OF_A_HOST, decoded, own, peers, foreign, read, files, calls)


def kept_by(host: int, model: dict[str, tuple[DType, tuple[int, ...]]]) -> int:
    """Return the bytes of other hosts' experts that the ranks of a host keep, each for itself (`engines/vllm/live/own_bases.py`)."""
    sizes = {name: dtype.itemsize * math.prod(shape) for name, (dtype, shape) in model.items()}
    elsewhere = {name for name in model if (owner := _rank_of(name)) is not None and owner // RANKS_OF_A_HOST != host}
    kept = 0
    for rank in range(host * RANKS_OF_A_HOST, (host + 1) * RANKS_OF_A_HOST):
        near = near_tensors(model, lambda name, rank=rank: _rank_of(name) in (None, rank))  # type: ignore[misc]
        kept += sum(sizes[name] for name in near & elsewhere)
    return kept


def _rank_of(name: str) -> int | None:
    """Return the rank that holds an expert. None for tensors that are divided."""
    if ".mlp.experts." not in name:
        return None
    return int(name.split(".experts.")[1].partition(".")[0]) * RANKS // _EXPERTS


def measure() -> Table:
    """Return the table of docs/scale.md."""
    model = tensors()
    total = sum(dtype.itemsize * math.prod(shape) for dtype, shape in model.values())
    shares = [share_of(rank, model) for rank in _LOOKED_AT]
    codec = next(row for row in json.loads((RESULTS / "gpu-codec.json").read_text())["rows"] if row["name"] == "fp8, 0.12%")
    step = next(row for row in json.loads((RESULTS / "step-cost.json").read_text())["rows"] if row[0] == "fp8-block")
    changed, ratio = float(step[1].rstrip("%")) / 100, float(step[-1].split(": ")[1].rstrip("×").replace(",", ""))
    each, delta, held = codec["elements"], total / ratio, max(share.held for share in shares)
    decode = [codec["resolve_kernels_ms"] * share.decoded / each for share in shares]
    overhead = codec["resolve_ms"] - codec["resolve_kernels_ms"]
    host_work = [overhead * share.calls for share in shares]
    hashing = [share.read / ratio / ASSUMED.hashing * 1e3 for share in shares]
    peers = [share.from_peers / ASSUMED.peers * 1e3 for share in shares]
    copies = [share.from_host / ASSUMED.host_copies * 1e3 for share in shares]
    staging = [sum(parts) for parts in zip(decode, host_work, hashing, peers, copies, strict=True)]
    engine = json.loads((RESULTS / "gpu-engine.json").read_text())["fp8-8b"]
    updates = [update for update in engine["updates"] if update["step"].endswith(":keep")]
    weights = engine["parameters"]
    paced_ms = statistics.median(update["worker_stage_ms"] for update in updates)
    paced = [paced_ms * share.decoded / weights for share in shares]
    write_ms, confirm_ms = (statistics.median(update["worker"][each] for update in updates) for each in ("write_ms", "confirm_ms"))
    write = write_ms * held / weights
    around = max(update["gap_ms"] - update["gap_usual_ms"][0] - update["worker"]["total_ms"] for update in updates if "gap_ms" in update)
    kept = [kept_by(host, model) for host in range(RANKS // RANKS_OF_A_HOST)]
    memory = codec["resolve_memory"] * held + 2 * _WINDOW
    worker = write + confirm_ms + ASSUMED.agreement_ms
    table = Table(
        "rank-cost",
        f"One step of {total / 1e12:.2f} TB in fp8 ({changed:.4%} changed, a delta of {delta / 1e9:.2f} GB) on 8 hosts of 8 GPUs, computed",
        ["per rank", "lowest to highest of five ranks", "computed from"],
    )
    rows: list[tuple[str, str, str]] = [
        ("weights in its memory", _gigabytes([share.held for share in shares]), "six experts of each layer, 1/8 of all others"),
        ("fetched from the store, per host", f"{delta / 1e9:.2f} GB in {delta / ASSUMED.link:.2f} s", f"{ASSUMED.link / 1e9:.0f} GB/s *"),
        ("delta files mapped and hashed", _gigabytes([share.read / ratio for share in shares]), "files with a tensor of the rank"),
        ("… time", _ms(hashing), f"{ASSUMED.hashing / 1e9:.0f} GB/s *"),
        ("weights decoded", _gigabytes([share.decoded for share in shares]), "blocks with an element of the rank"),
        ("… of which its own", _gigabytes([share.own for share in shares]), ""),
        ("… read from GPUs of the host", _gigabytes([share.from_peers for share in shares]), ""),
        ("… time", _ms(peers), f"{ASSUMED.peers / 1e9:.0f} GB/s *"),
        ("… read from host memory", _gigabytes([share.from_host for share in shares]), "experts of other hosts in the same blocks"),
        ("… time", _ms(copies), f"{ASSUMED.host_copies / 1e9:.0f} GB/s *"),
        ("decoding on the GPU", _ms(decode), f"{codec['resolve_kernels_ms']} ms for {each / 1e9:.1f} B weights"),
        ("calls of the codec", _range([share.calls for share in shares]), "windows of at most 256 MiB in one file"),
        ("… work of the host", _ms(host_work), f"{overhead:.1f} ms for a call"),
        ("staging, if nothing overlaps and nothing waits", _ms(staging), "the sum, `--gpu-share 1`"),
        ("pace of the default `--gpu-share`", _ms(paced), f"{paced_ms:.0f} ms for {weights / 1e9:.1f} B weights"),
        ("staging with the default", _ms([max(each) for each in zip(staging, paced, strict=True)]), "the longer of the two"),
        ("write and digest, in one pass", f"{write:.1f} ms", f"{write_ms:.1f} ms for {weights / 1e9:.1f} B weights"),
        ("confirm", f"{confirm_ms:.1f} ms", "as measured"),
        ("the worker within the swap", f"{worker:.1f} ms", f"with {ASSUMED.agreement_ms:.0f} ms * to agree"),
        (
            "gap between tokens, KV cache kept",
            f"{worker + ASSUMED.step_ms + around:.0f} ms",
            f"with a step of {ASSUMED.step_ms:.0f} ms *, and {around:.1f} ms that a gap was longer than a step and the worker",
        ),
        ("GPU memory for an update", f"{memory / 1e9:.2f} GB", f"{codec['resolve_memory']:.1%} of its weights, and two windows"),
        ("spool, per host", f"{2 * delta / 1e9:.1f} GB", "two deltas"),
        ("weights kept in host memory, on each of the 8 hosts", _gigabytes(kept), "experts of other hosts near a rank's own"),
    ]
    table.rows = [list(row) for row in rows]
    table.notes = ["Rates with a star are assumptions."]
    return table


def _gigabytes(values: list[float] | list[int]) -> str:
    low, high = f"{min(values) / 1e9:.2f}", f"{max(values) / 1e9:.2f}"
    return f"{low} GB" if low == high else f"{low} to {high} GB"


def _range(values: list[int]) -> str:
    return f"{min(values)} to {max(values)}"


def _ms(values: list[float]) -> str:
    low, high = f"{min(values):.0f}", f"{max(values):.0f}"
    return f"{low} ms" if low == high else f"{low} to {high} ms"


if __name__ == "__main__":
    from report import show

    show(measure())
