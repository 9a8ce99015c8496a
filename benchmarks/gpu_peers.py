"""Two workers with halves of a model read each other's memory, as the workers of a vLLM server do (engines/vllm/live/peers.py).

    python benchmarks/gpu_peers.py                          # two processes share one NVIDIA GPU, or have one each
    python benchmarks/gpu_peers.py --device cpu --tensors 8 --updated 2

Three parts, each printed as a line of JSON:

read    each worker reads all divided tensors from its own memory and that of the other, and compares them bit for bit
update  both workers decode an update against their memory, write it, and compare all weights bit for bit
killed  worker 1 is killed, and worker 0 reads again: it must get the same bits or an error, and must not wait
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import time
from typing import Any

from free_ports import free_port

ROWS, COLUMNS = 4096, 4096
CUTS = ("rows", "columns", "turned")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--device", default="cuda")
    arguments.add_argument("--tensors", type=int, default=64, help="bf16 tensors of 32 MiB that are divided")
    arguments.add_argument("--updated", type=int, default=16, help="the number of them that the second part updates")
    arguments.add_argument("--repeats", type=int, default=3)
    arguments.add_argument("--timeout", type=float, default=300)
    given = arguments.parse_args()
    port = free_port()
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_worker, args=(rank, port, given)) for rank in range(2)]
    for worker in workers:
        worker.start()
    workers[0].join(given.timeout)
    hangs = workers[0].is_alive()
    for worker in workers:
        worker.kill()
        worker.join()
    if hangs or workers[0].exitcode or workers[1].exitcode != -signal.SIGKILL:
        raise SystemExit(f"worker 0 hangs: {hangs}; the workers ended with {[worker.exitcode for worker in workers]}")


def _worker(rank: int, port: int, given: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    from deltawire.engines.vllm.live.peers import PeerBases

    device = torch.device("cpu")
    if given.device == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)

    def share(value: Any) -> tuple[list[Any], int]:
        found = [None, None]
        dist.all_gather_object(found, value)
        return found, rank

    with torch.no_grad():
        names = [f"layer.{number:03}.weight" for number in range(given.tensors)]
        layout = _layout({name: _whole(number, device) for number, name in enumerate(names)}, rank)
        source = PeerBases(_Nothing(), share=share)
        dist.barrier()
        free = _free(device)
        began = time.perf_counter()
        source.connect(layout)
        connected = time.perf_counter() - began
        assert source.status()["bases"]["peers"] == given.tensors, source.status()
        report: dict[str, Any] = {"part": "read", "device": _name(device), "tensors": given.tensors, "connect_s": connected}
        report["memory_for_mapping"] = free - _free(device)
        _wait(device)
        wrong = sum(not _same(source.base(name), _whole(number, device)) for number, name in enumerate(names))
        assert not wrong, f"{wrong} tensors differ"
        report["bit_equal"] = True
        nbytes = given.tensors * ROWS * COLUMNS * 2
        for who in ("alone", "both"):
            for cut in (*CUTS, "all"):
                chosen = [name for number, name in enumerate(names) if cut in ("all", CUTS[number % 3])]
                dist.barrier()
                if who == "both" or rank == 0:
                    report[f"{who}_{cut}_GB_s"] = _rate(source, chosen, device, given.repeats, nbytes * len(chosen) // len(names))
                dist.barrier()
        _print(rank, report)
        del source, layout
        _update(rank, device, share, given.updated)
        layout = _layout({names[0]: _whole(0, device)}, rank)
        source = PeerBases(_Nothing(), share=share)
        source.connect(layout)
        expected = _whole(0, device)
        assert _same(source.base(names[0]), expected)
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        while True:  # the other process ends at any moment
            try:
                share(None)
            except RuntimeError:
                break
        began = time.perf_counter()
        try:
            result = "same bits" if _same(source.base(names[0]), expected) else "other bits"
        except Exception as error:
            result = f"{type(error).__name__}: {error}"
        _print(rank, {"part": "killed", "result": result, "seconds": time.perf_counter() - began})
        assert result != "other bits"
    os._exit(0)  # the group has lost a member


def _whole(number: int, device: Any) -> Any:
    """Return a tensor of the model, the same in each worker."""
    import torch

    generator = torch.Generator(device).manual_seed(number)
    return (torch.randn(ROWS, COLUMNS, generator=generator, device=device) * 0.02).to(torch.bfloat16)


def _layout(state: dict[str, Any], rank: int) -> Any:
    """Return how a worker holds its half of each tensor: of the rows, of the columns, or of the columns of the transposed tensor."""
    from deltawire.dtypes import dtype_named
    from deltawire.engines.vllm.layout.model_layout import ModelLayout
    from deltawire.engines.vllm.layout.types import TensorLayout
    from deltawire.subscribe.tensor_table import TensorSpec

    spec = TensorSpec(dtype_named("BF16"), (ROWS, COLUMNS))
    tensors = {}
    for number, (name, whole) in enumerate(state.items()):
        tensors[name] = TensorLayout(spec, "partial", (_half(whole, CUTS[number % 3], rank),), reason="divided")
    return ModelLayout(tensors, {})


def _half(whole: Any, cut: str, rank: int) -> Any:
    import torch

    from deltawire.engines.vllm.layout.types import Nest, Placement

    rows, columns = ROWS // 2, COLUMNS // 2
    if cut == "rows":
        half, nest = whole.chunk(2)[rank], Nest((rows * COLUMNS,), (1,), (1,), rank * rows * COLUMNS)
    elif cut == "columns":
        half, nest = whole.chunk(2, 1)[rank], Nest((ROWS, columns), (COLUMNS, 1), (columns, 1), rank * columns)
    else:
        half, nest = whole.chunk(2, 1)[rank].t(), Nest((ROWS, columns), (COLUMNS, 1), (1, ROWS), rank * columns)
    return Placement((nest,), half.contiguous().clone().view(-1).view(torch.int16), 16)


def _update(rank: int, device: Any, share: Any, count: int) -> None:
    """Publish an update of some tensors, decode it against the memory of both workers, and write it."""
    import numpy as np
    import torch

    from deltawire.chain.log import ChainLog
    from deltawire.engines.vllm.live.live_weights import LiveWeights
    from deltawire.engines.vllm.live.peers import PeerBases
    from deltawire.engines.vllm.live.update_types import LiveVersion
    from deltawire.publish import Publisher
    from deltawire.store.memory import MemoryStore

    state = {f"layer.{number:03}.weight": _whole(number, torch.device("cpu")) for number in range(count)}
    layout = _layout({name: tensor.to(device) for name, tensor in state.items()}, rank)
    store = MemoryStore()
    publisher, log = Publisher(store, attachments={}), ChainLog(store)
    publisher.publish(state)
    base = log.head()
    rng = np.random.default_rng(1)
    for tensor in state.values():
        bits = tensor.view(torch.int16).view(-1).numpy()
        bits[rng.integers(0, bits.size, bits.size // 100)] ^= 1
    publisher.publish(state)
    target = log.head()
    assert base is not None
    assert target is not None
    source = PeerBases(_Nothing(), share=share)
    source.connect(layout)
    weights = LiveWeights(None, lambda _: layout, source=source)
    weights.learn({name: tensor.spec for name, tensor in layout.tensors.items()}, alone=False)
    weights.own(*share(layout.blocks()))
    digests, _ = share(weights.digest().owned)
    assert digests[0] + digests[1] == base.digest
    weights.label(LiveVersion(log.ref(base), base.digest))
    _wait(device)
    before = _peak(device, reset=True)
    began = time.perf_counter()
    staged = weights.stage(_Hop(base, target), lambda entry: store.get(entry.key, limit=entry.size))
    seconds = time.perf_counter() - began

    def agree(failed: bool, digest: Any) -> list[int]:
        told, _ = share((failed, digest))
        return [each for each, (flag, _) in enumerate(told) if flag] or ([] if told[0][1] == told[1][1] else [0, 1])

    peak = _peak(device) - before
    outcome = weights.swap(staged, agree)
    assert outcome.outcome == "made", outcome
    expected = _layout({name: tensor.to(device) for name, tensor in state.items()}, rank)
    for name in state:
        mine, right = (each.tensors[name].placements[0].memory for each in (layout, expected))
        assert bool((mine == right).all()), name
    share(None)
    wrong = sum(not _same(source.base(name), tensor.to(device)) for name, tensor in state.items())
    assert not wrong
    size = sum(tensor.nbytes for tensor in state.values())
    _print(
        rank, {"part": "update", "bytes": size, "stage_s": seconds, "peak_bytes": peak, "staged_bytes": staged.nbytes, "bit_equal": True}
    )
    share(None)


class _Hop:
    def __init__(self, base: Any, target: Any) -> None:
        self.base, self.target, self.files = base, target, target.files


class _Nothing:
    """A source of tensors that is never needed."""

    def hold(self, wanted: Any) -> str | None:
        return f"{len(wanted)} tensors cannot be read" if wanted else None

    def writes(self, name: str) -> bool:
        return False

    def base(self, name: str) -> Any:
        raise LookupError(name)

    def settled(self, ref: Any, changes: Any) -> None:
        """Do nothing."""


def _rate(source: Any, names: list[str], device: Any, repeats: int, nbytes: int) -> float:
    best = 0.0
    for _ in range(repeats):
        _wait(device)
        began = time.perf_counter()
        for name in names:
            source.base(name)
        _wait(device)
        best = max(best, nbytes / (time.perf_counter() - began) / 1e9)
    return round(best, 2)


def _same(one: Any, other: Any) -> bool:
    import torch

    return bool((one.view(torch.int16) == other.view(torch.int16)).all())


def _wait(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _free(device: Any) -> int:
    import torch

    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else 0


def _peak(device: Any, *, reset: bool = False) -> int:
    import torch

    if device.type != "cuda":
        return 0
    if reset:
        torch.cuda.reset_peak_memory_stats(device)
        return int(torch.cuda.memory_allocated(device))
    return int(torch.cuda.max_memory_allocated(device))


def _name(device: Any) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _print(rank: int, report: dict[str, Any]) -> None:
    print(json.dumps({"rank": rank, **report}), flush=True)


if __name__ == "__main__":
    main()
