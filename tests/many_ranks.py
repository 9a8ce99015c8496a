"""Let many ranks publish together, as threads of one process, and read their versions back.

    PYTHONPATH=src python tests/many_ranks.py                  # 2,048 ranks
    PYTHONPATH=src python tests/many_ranks.py --ranks 256

The number of files, messages and entries of a file list grows with the ranks, so each rank holds only 256 weights, of which 2 change.
All ranks share one interpreter, so the seconds are far more than a cluster needs.
"""

from __future__ import annotations

import argparse
import json
import resource
import threading
import time
from typing import Any

import numpy as np
import threads_as_ranks

from deltawire import Publisher, ReaderOptions, Subscriber, WriterOptions
from deltawire.publish.sharded import ShardedPublisher
from deltawire.store.memory import MemoryStore

STACK = 256 << 10
"""The bytes of the stack of a thread. The default would reserve 8 MiB for each rank."""


def states(ranks: int) -> list[dict[str, Any]]:
    """Return an anchor and two versions after it. Every rank has changes in both."""
    random = np.random.default_rng(0)
    found = [{name: random.standard_normal((ranks, 128)).astype(np.float32) for name in ("down.weight", "up.weight")}]
    for step in range(2):
        found.append({name: array.copy() for name, array in found[-1].items()})
        for array in found[-1].values():
            array[:, step] += 1
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2048)
    ranks = parser.parse_args().ranks
    versions, store, alone = states(ranks), MemoryStore(), MemoryStore()
    options = WriterOptions(threads=1, skips=False)
    threads_as_ranks.LONGEST = 3600.0
    threading.stack_size(STACK)

    def work(one: threads_as_ranks.ThreadRank) -> list[Any]:
        with ShardedPublisher(one, store, attachments={}, options=options) as publisher:
            found = []
            for state in versions:
                held = threads_as_ranks.shards_of(state, one.rank, ranks)
                one.exchange(b"begin")
                start = time.perf_counter()
                found.append(publisher.publish(held))
                if one.rank == 0:
                    print(f"{found[-1].kind}: published after {time.perf_counter() - start:.1f} s", flush=True)
            return found

    answers = threads_as_ranks.run_ranks(ranks, work)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    with Publisher(alone, dtype="float32", options=options, attachments={}) as publisher:
        expected = [publisher.publish(state).digest for state in versions]
    for answer in answers:
        assert [version.digest for version in answer] == expected
    with Subscriber(store, options=ReaderOptions(pin=False), threads=1) as reader:
        for version, state in zip(answers[0], versions, strict=True):
            start = time.perf_counter()
            reader.sync(seq=version.seq)
            seconds = time.perf_counter() - start
            for name, array in state.items():
                assert reader.state[name].tobytes() == array.tobytes()
            record = bytes(store.get(f"commit/{version.seq:020}.json", limit=1 << 20))
            commit = json.loads(record)
            if listed := commit.get("list"):
                files = f"{listed['files']:,} files in a list of {listed['size']:,} bytes"
            else:
                files = f"{len(commit['files']):,} files"
            print(f"{version.kind}: {files}, a record of {len(record):,} bytes; read back in {seconds:.1f} s, and equal")
    print(f"Memory of the process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GiB.")


if __name__ == "__main__":
    main()
