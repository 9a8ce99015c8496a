"""Two workers of a server with tensor parallelism, without the server: each loads models and follows updates with the deltawire backend.

    with RankPair(nursery, folder) as pair:
        for report in pair.follow(job): ...

The nursery forks the workers, and vLLM connects them as it connects the workers of a server on CPUs. They load one model after the other.
Run as a script, this file is one of the workers. It ends when the test closes the connection.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from server_nursery import ServerNursery

RANKS = 2
_PATIENCE = 600.0


@dataclass(frozen=True)
class Job:
    """A chain for the workers to follow.

    Parameters
    ----------
    case
        The name of a case in layout_cases.py.
    folder
        An empty directory for the spool.
    first, last
        Checkpoints of the first and of the last version.
    store
        The location of the chain.
    table
        The file with the tensors of the chain.
    ref
        The commit of the first version.
    seqs
        The numbers of all commits after it.
    peers
        False if the workers do not read each other's memory.
    """

    case: str
    folder: str
    first: str
    last: str
    store: str
    table: str
    ref: dict[str, Any]
    seqs: list[int]
    peers: bool = True


class RankPair:
    """The test's connection to the two workers."""

    def __init__(self, nursery: ServerNursery, folder: Path) -> None:
        self._nursery = nursery
        self._logs = [folder / f"rank-{rank}.log" for rank in range(RANKS)]
        self._connections: list[Any] = []
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(_PATIENCE)
            port = listener.getsockname()[1]
            self._shared = f"deltawire-test-{os.getpid()}-{port}"
            arguments = [str(port), str(folder / "group"), self._shared]
            self._ids = [nursery.run(Path(__file__), [str(rank), *arguments], log) for rank, log in enumerate(self._logs)]
            for _ in self._ids:
                connection = listener.accept()[0]
                connection.settimeout(_PATIENCE)
                self._connections.append(connection.makefile("rw"))
                connection.close()  # the file stays open

    def follow(self, job: Job) -> list[dict[str, Any]]:
        """Let both workers follow a chain. Returns what each of them reports (see `_follow`)."""
        for connection in self._connections:
            connection.write(json.dumps(asdict(job)) + "\n")
            connection.flush()
        lines = [connection.readline() for connection in self._connections]
        assert all(lines), "a worker has ended:\n" + "\n".join(log.read_text(errors="replace")[-8000:] for log in self._logs)
        reports = sorted(map(json.loads, lines), key=lambda report: report["rank"])
        assert not any("error" in report for report in reports), "\n".join(report.get("error", "") for report in reports)
        return reports

    def __enter__(self) -> RankPair:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._connections:
            connection.close()
        for each in self._ids:
            self._nursery.kill(each)
        for path in Path("/dev/shm").glob(f"vllm_dist_{self._shared}-*"):  # vLLM leaves it if a worker is killed
            path.unlink()


# The worker


def _follow(job: Job, rank: int) -> dict[str, Any]:
    """Follow a chain, and compare the result with a fresh load. After the first update, one of the workers fails once."""
    import pytest
    from layout_cases import emulate, stays, visible
    from loaded_models import load_model, start_backend
    from model_logits import logits
    from model_memory import addresses, difference, memory

    with pytest.MonkeyPatch.context() as patch:
        emulate(job.case, patch)
        patch.setenv("DELTAWIRE_PEERS", "1" if job.peers else "0")
        live = load_model(Path(job.first), tensor_parallel_size=RANKS)
        live.vllm_config.instance_id = job.case  # the workers of a server have the same one
        computed, before, places = logits(live), memory(live.model), addresses(live.model)
        backend = start_backend(live, spool=job.folder, url=job.store, confirm="everything")
        with live.active():
            report = {"learnt": backend.learn(job.table), "learning": difference(memory(live.model), before)}
        report["adopted"] = backend.adopt(job.ref)["seq"]
        swaps = []
        for number, seq in enumerate(job.seqs):
            backend.prepare(seq)
            with live.active():
                if number == 1:
                    held = memory(live.model), logits(live)
                    with pytest.MonkeyPatch.context() as once:
                        if rank == RANKS - 1:
                            _fail_once(once)
                        report["failed"] = backend.swap(seq)["outcome"]
                    report["reverted"] = (memory(live.model), logits(live)) == held
                swaps.append(backend.swap(seq))
        report |= {"swaps": [{name: swap[name] for name in ("outcome", "seq", "error", "last")} for swap in swaps]}
        report["status"] = backend.status()
        backend.shutdown()
        fresh = load_model(Path(job.last), tensor_parallel_size=RANKS)
        report["logits"] = [hashlib.sha256(each).hexdigest() for each in (computed, logits(live), logits(fresh))]
        report["difference"] = visible(difference(memory(live.model), memory(fresh.model)))
        report["changed"] = len(difference(memory(live.model), before))
        report["stays"] = stays(addresses(live.model)) == stays(places)
        return report


def _fail_once(patch: Any) -> None:
    """Let the next check of what was written fail."""
    from deltawire.engines.vllm.live.layout_update import LayoutUpdate

    check, failures = LayoutUpdate.check, iter([OSError("this worker fails")])

    def fail(*arguments: Any, **options: Any) -> Any:
        for error in failures:
            raise error
        return check(*arguments, **options)

    patch.setattr(LayoutUpdate, "check", fail)


def _work(rank: int, port: int, group: str, shared: str) -> None:
    from loaded_models import join_workers

    os.environ["VLLM_DIST_IDENT"] = shared  # it names the memory for messages between ranks; vLLM's worker sets it too
    join_workers(RANKS, rank, f"file://{group}")
    with socket.create_connection(("127.0.0.1", port)) as connection, connection.makefile("rw") as stream:
        for line in stream:
            try:
                report = _follow(Job(**json.loads(line)), rank)
            except Exception:
                report = {"error": traceback.format_exc()}
            stream.write(json.dumps({**report, "rank": rank}) + "\n")
            stream.flush()


if __name__ == "__main__":
    _work(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
