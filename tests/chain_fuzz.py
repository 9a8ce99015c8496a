"""Test all readers with hostile chains whose hashes are right. A small sound chain is changed and linked again.

    python tests/chain_fuzz.py --seeds 1000          # seeds 0 to 999
    python tests/chain_fuzz.py --first 4711          # one seed, and what it changes

Readers refuse a damaged record because of its hash. Here the hashes of parents, links, bases, targets and files are computed after the
change, so that readers reach the change itself. Anyone who can write to the store can do that to an unsigned chain. These rules hold for
every reader:

- It succeeds, and has the weights of the version's digest; or it raises a `DeltawireError`. Any other exception is a finding.
- It ends. The store refuses more calls than any sound reader makes (`TooManyCalls`), and a watchdog ends the process.
- It allocates no memory only because a record asks for it. The address space may grow by `MEMORY` only.
- After a publisher has taken such a chain over and published, readers that succeed have what it published.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import resource
import sys
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chain_mutations import (
    hostile,
)
from chain_readers import (
    READERS,
)

from deltawire.errors import DeltawireError
from deltawire.store import Store
from deltawire.store.memory import MemoryStore
from deltawire.store.wrapped import WrappedStore

CALLS = 4000
"""The number of calls of the store that one reader may make. On the sound chain no reader makes a tenth of them."""
MEMORY = 2 << 30
SECONDS = 600
"""The number of seconds for one seed, even on a busy machine. Only work that never ends takes that long."""


class TooManyCalls(BaseException):
    """A reader made too many calls. This is not an `Exception`, so that no code retries it."""


class CountingStore(WrappedStore):
    """A store that raises when it was called too often."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.calls = 0

    def _count(self) -> None:
        self.calls += 1
        if self.calls > CALLS:
            raise TooManyCalls(f"more than {CALLS} calls of the store")

    def get(self, key: str, *, limit: int) -> bytes:
        self._count()
        return super().get(key, limit=limit)

    def head(self, key: str) -> Any:
        self._count()
        return super().head(key)

    def read_into(self, key: str, buffer: memoryview, **options: Any) -> None:
        self._count()
        super().read_into(key, buffer, **options)

    def put_if_absent(self, key: str, data: bytes) -> None:
        self._count()
        super().put_if_absent(key, data)

    def put(self, key: str, data: Any, **options: Any) -> None:
        self._count()
        super().put(key, data, **options)

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[Any]:
        self._count()
        return super().list(prefix, after=after)

    def delete(self, keys: Any) -> None:
        self._count()
        super().delete(keys)

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Finding:
    seed: int
    reader: str
    changes: list[str]
    trace: str

    def __str__(self) -> str:
        changes = "\n".join(f"    {each}" for each in self.changes)
        return f"seed {self.seed}, {self.reader}:\n{changes}\n{self.trace}"


def _copy_of(store: MemoryStore) -> MemoryStore:
    copied = MemoryStore()
    for info in store.list(""):
        copied.put(info.key, store.get(info.key, limit=1 << 30))
    return copied


@contextlib.contextmanager
def bounded_memory() -> Iterator[None]:
    """Let the address space grow by `MEMORY` only, so that allocations of sizes from hostile records fail."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def try_seed(seed: int, folder: Path, outcomes: dict[str, int] | None = None) -> list[Finding]:
    """Run every reader on the chain of a seed. Each gets its own copy."""
    store, changes = hostile(seed)
    findings = []
    for reader in READERS:
        with tempfile.TemporaryDirectory(dir=folder) as own:
            try:
                with bounded_memory():
                    reader(CountingStore(_copy_of(store)), Path(own))
                outcome = "succeeded"
            except DeltawireError as error:
                outcome = type(error).__name__
            except (Exception, TooManyCalls):
                outcome = "finding"
                findings.append(Finding(seed, reader.__name__, changes, traceback.format_exc()))
            if outcomes is not None:
                outcomes[outcome] = outcomes.get(outcome, 0) + 1
    return findings


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--first", type=int, help="the first seed (0)")
    parser.add_argument("--seeds", type=int, default=1, help="how many")
    parser.add_argument("--most", type=int, default=10, help="end after this many findings")
    chosen = parser.parse_args()
    first, outcomes, findings = chosen.first or 0, dict[str, int](), list[Finding]()
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(first, first + chosen.seeds):
            faulthandler.dump_traceback_later(SECONDS, exit=True)
            if chosen.seeds == 1:
                print("\n".join(hostile(seed)[1]))
            for finding in try_seed(seed, Path(folder), outcomes):
                print(finding, flush=True)
                findings.append(finding)
            if len(findings) >= chosen.most:
                break
        faulthandler.cancel_dump_traceback_later()
    print(f"{seed + 1 - first} chains, {len(findings)} findings; " + ", ".join(f"{name} {outcomes[name]}" for name in sorted(outcomes)))
    sys.exit(bool(findings))


if __name__ == "__main__":
    main()
