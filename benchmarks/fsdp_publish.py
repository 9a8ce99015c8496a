"""Compare two methods of publishing a model that is sharded over ranks (DTensor, gloo).

With `FSDPPublisher` every rank publishes its own shards. The other method gathers the model on rank 0. The benchmark needs torch.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from free_ports import free_port
from report import Table

from deltawire.publish.writer_options import WriterOptions

RANKS = 4
_ROWS = 4096


def measure(elements: int, steps: int, ranks: int = RANKS) -> Table:
    """Publish steps in which 1% of the weights change by one ULP, with both methods in turn."""
    table = Table(
        "fsdp-publish",
        f"FSDP2 publish: {2 * elements / 2**30:.2g} GiB of bf16 weights over {ranks} ranks on one machine, {steps} steps of 1% changes",
        [
            "method",
            "seconds per step",
            "uploaded per rank",
            "received from other ranks, rank 0",
            "weights in memory besides the model, rank 0",
        ],
    )
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        workers = [context.Process(target=_rank, args=(rank, ranks, port, elements, steps, folder)) for rank in range(ranks)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if any(worker.exitcode for worker in workers):
            raise RuntimeError(f"ranks ended with {[worker.exitcode for worker in workers]}")
        found = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]
    medians = {}
    for method, title in [("own", "every rank its own shards (FSDPPublisher)"), ("gather", "gathered on rank 0 (full_tensor, Publisher)")]:
        medians[method] = statistics.median(max(rank[method]["seconds"][step] for rank in found) for step in range(steps))
        uploaded = [statistics.mean(rank[method]["bytes"]) for rank in found]
        spread = _size(uploaded[0]) if max(uploaded) == min(uploaded) else f"{_size(min(uploaded))} to {_size(max(uploaded))}"
        received = _size(statistics.mean(found[0][method]["received"]))
        table.rows.append([title, f"{medians[method]:.3g}", spread, received, _size(found[0][method]["held"])])
    own = [statistics.mean(rank["own"]["bytes"]) for rank in found]
    table.check(f"ranks upload the same within 10% ({max(own) / min(own) - 1:.1%} apart)", max(own) < 1.1 * min(own))
    table.check(f"faster than gathering ({medians['gather'] / medians['own']:.1f} times)", medians["own"] < medians["gather"])
    table.notes += [
        "Seconds are those of the slowest rank until `publish` returns, so they include the deltas back. Skips are made on a thread. "
        "All ranks share this machine's cores.",
        "Received bytes are weights, without messages of a few kB. For gathering they are computed, not measured. The last column is "
        "computed, too: a rank's copy of its shards, or the gathered state and the publisher's copy of it.",
    ]
    return table


def _size(count: float) -> str:
    for unit, name in [(2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")]:
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count:.0f} B"


def _rank(rank: int, ranks: int, port: int, elements: int, steps: int, folder: str) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    import deltawire
    from deltawire.trainers.fsdp import FSDPPublisher, TorchRanks

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
    dist.init_process_group("gloo")
    threads = max(1, (os.cpu_count() or 1) // ranks)
    torch.set_num_threads(threads)
    mesh = init_device_mesh("cpu", (ranks,))
    random = torch.Generator().manual_seed(rank)
    layers = max(1, elements // (_ROWS * 1024))
    local = {f"layer.{n:03}": torch.randn(_ROWS // ranks, 1024, generator=random).mul_(0.02).bfloat16() for n in range(layers)}
    state = {name: DTensor.from_local(tensor, mesh, [Shard(0)]) for name, tensor in local.items()}
    nbytes = sum(tensor.nbytes for tensor in local.values())
    moved = [0]
    deliver = TorchRanks.deliver

    def counted(self: Any, pieces: Any) -> Any:
        arrived = deliver(self, pieces)
        moved[0] += sum(len(piece) for sender, piece in enumerate(arrived) if sender != rank)
        return arrived

    TorchRanks.deliver = counted  # type: ignore[method-assign]
    sent: list[int] = []
    result: dict[str, dict[str, Any]] = {
        "own": {"seconds": [], "bytes": [], "received": [], "held": nbytes},
        "gather": {"seconds": [], "bytes": [], "received": [], "held": 2 * nbytes * ranks if rank == 0 else 0},
    }

    def note(event: Any) -> None:
        if event.name == "rank-published":
            sent.append(event.fields["bytes"])

    own = FSDPPublisher(Path(folder, "own"), options=WriterOptions(threads=threads), on_event=note)
    alone = deltawire.Publisher(Path(folder, "gather"), options=deltawire.WriterOptions(threads=threads * ranks)) if rank == 0 else None
    for step in range(steps + 1):
        for tensor in local.values():  # an optimizer step: 1% of the weights change by one ULP
            flat = tensor.view(torch.int16).view(-1)
            at = torch.randint(0, flat.numel(), (flat.numel() // 100,), generator=random)
            flat[at] += 1
        dist.barrier()
        moved[0], start = 0, time.perf_counter()
        own.publish(state, step=step)
        if step:  # the first version is a full checkpoint
            result["own"]["seconds"].append(time.perf_counter() - start)
            result["own"]["bytes"].append(sent[-1])
            result["own"]["received"].append(moved[0])
        dist.barrier()
        start = time.perf_counter()
        whole = {}
        for name, tensor in state.items():
            full = tensor.full_tensor()
            if rank == 0:
                whole[name] = full
        version = alone.publish(whole, step=step) if alone else None
        dist.barrier()
        if step:
            result["gather"]["seconds"].append(time.perf_counter() - start)
            result["gather"]["bytes"].append(version.bytes if version else 0)
            result["gather"]["received"].append(nbytes * (ranks - 1))
    own.close()
    if alone:
        alone.close()
        with (
            deltawire.Subscriber(Path(folder, "own"), options=deltawire.ReaderOptions(pin=False)) as a,
            deltawire.Subscriber(Path(folder, "gather"), options=deltawire.ReaderOptions(pin=False)) as b,
        ):
            if a.sync().digest != b.sync().digest:
                raise AssertionError("both methods must lead to the same weights")
    Path(folder, f"{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()
