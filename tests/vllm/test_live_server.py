"""Servers with one and two workers follow a chain in their live memory: nothing is loaded, and nothing is kept in a mirror."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import pytest
from live_server import LiveServer, wait_until
from tiny_checkpoints import TinyModel, runtime_hashes

from deltawire.chain.reader_options import ReaderOptions
from deltawire.chain.routes.remaining_routes import Routes
from deltawire.cli.doctor.examine import examine
from deltawire.engines import KvCache
from deltawire.engines.vllm import QUARANTINED_LABEL
from deltawire.engines.vllm.driver.sidecar import Sidecar
from deltawire.events import Event
from deltawire.format.digest import Digest
from deltawire.store import open_store
from deltawire.subscribe.spool.delta_spool import DeltaSpool
from deltawire.subscribe.sync_context import SyncContext
from deltawire.subscribe.tensor_table import read_tensor_table, write_table

pytestmark = pytest.mark.slow


def doctor_says(server: LiveServer, url: str) -> tuple[str, str]:
    """Return the level and the text of what `deltawire doctor --engine` finds out about a server."""
    with open_store(url) as store:
        found = examine(store, url, read_only=True, test_bytes=0, engine=server.url).findings
    ((level, what),) = [(each.level, each.what) for each in found if each.check == "server"]
    return level, what


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_server_follows_a_chain_in_its_live_memory(
    ranks: int, start_run: Callable[[TinyModel], Any], serve: Callable[..., LiveServer]
) -> None:
    run = start_run(TinyModel("dense"))
    first = run.publish(changed=False)
    faults = run.folder / "faults.json"
    server = serve(run.checkpoint, ranks=ranks, environment={"DELTAWIRE_TEST_FAULTS": str(faults)}).wait()
    level, what = doctor_says(server, run.store)
    assert (level, what.startswith("vLLM 0.")) == ("note", True), what
    assert "no version of a chain was loaded" in what
    log = ReaderOptions().open_log(open_store(run.store))
    commit = log.read(first.seq)
    assert commit is not None
    context = SyncContext(log, Routes(log), patience=0)
    spool = DeltaSpool(run.folder / "spool")
    write_table(spool.table_path, read_tensor_table(context, context.routes.find(None, commit)[0]))
    server.routes.initialise({"spool": str(spool.folder)})
    workers = server.routes.call_workers("deltawire_learn", str(spool.table_path))
    assert all(worker["live"] for worker in workers), workers
    total = Digest()
    for worker in workers:
        total += Digest.from_hex(worker["digest"])
    assert total == commit.digest
    assert [worker["kept_bytes"] for worker in workers] == [0] * ranks  # several workers read each other's memory
    assert all((worker["bases"]["peers"] > 0) == (ranks > 1) and worker["bases"]["kept"] == 0 for worker in workers), workers
    assert not list(spool.folder.glob("kept/*/*.bin"))
    workers = server.routes.call_workers("deltawire_adopt", log.ref(commit).plain())
    assert [worker["seq"] for worker in workers] == [commit.seq] * ranks

    def hop_to(seq: int) -> None:
        nonlocal commit
        target = log.read(seq)
        assert commit is not None
        assert target is not None
        context = SyncContext(log, Routes(log), patience=0)
        for hop in context.routes.find(log.ref(commit), target):
            spool.put(hop, context)
        server.routes.prepare(seq)
        wait_until(lambda: all(worker["staged"] == seq for worker in server.routes.status()), "staging")
        commit = target

    for number in range(3):
        before = commit
        version = run.publish()
        hop_to(version.seq)
        if number == 1:  # one of the workers fails: all have the old weights back
            hashes = server.routes.checksums()
            faults.write_text(json.dumps({"apply": [ranks - 1]}))
            answer = server.routes.swap(version.seq, str(version.seq), KvCache.DROP)
            assert (answer.outcome, answer.running) == ("refused", True), answer
            assert server.routes.checksums() == hashes
            faults.unlink()
            commit = before
            hop_to(version.seq)
        answer = server.routes.swap(version.seq, str(version.seq), KvCache.DROP)
        assert answer.outcome == "made", answer
        assert all(worker["last"]["loaded_anew"] == 0 for worker in answer.workers)
        assert server.routes.checksums() == runtime_hashes(run.state, ranks)

    assert doctor_says(server, run.store)[0] == "ok"
    server.routes.pause("keep", clear_cache=False)
    assert doctor_says(server, run.store)[0] == "warning"
    server.routes.resume()

    # The same server without a sidecar: the workers fetch deltas, and load a full checkpoint, from the store.
    server.routes.initialise({"spool": str(run.folder / "other-spool"), "url": run.store})
    for anew in (False, True):
        version = run.publish()
        answer = server.routes.swap(version.seq, str(version.seq), KvCache.DROP, anew=anew)
        assert answer.outcome == "made", answer
        assert [worker["last"]["loaded_anew"] for worker in answer.workers] == [int(anew)] * ranks
        assert server.routes.checksums() == runtime_hashes(run.state, ranks)

    # vLLM writes to the weights by itself. Then they are not those of any version, even if an update was staged before.
    version = run.publish()
    level, what = doctor_says(server, run.store)
    assert (level, what.endswith(f"the newest version is commit {version.seq}")) == ("warning", True), what
    server.routes.prepare(version.seq)
    server.routes._post("/weight_checker", {"action": "reset"})
    assert server.routes.weight_version() == QUARANTINED_LABEL
    level, what = doctor_says(server, run.store)
    assert (level, "is quarantined" in what) == ("wrong", True), what
    assert [(worker["seq"], worker["staged"]) for worker in server.routes.status()] == [(None, None)] * ranks
    answer = server.routes.swap(version.seq, str(version.seq), KvCache.DROP)
    assert [worker["last"]["loaded_anew"] for worker in answer.workers] == [1] * ranks
    assert server.routes.checksums() == runtime_hashes(run.state, ranks)
    assert server.routes.weight_version() == str(version.seq)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_server_that_is_far_behind_gets_one_skip(
    ranks: int, start_run: Callable[[TinyModel], Any], serve: Callable[..., LiveServer]
) -> None:
    """The sixteenth version after a full checkpoint has a skip from it."""
    run = start_run(TinyModel("dense"))
    first = run.publish(changed=False)
    server = serve(run.checkpoint, ranks=ranks).wait()
    events: list[Event] = []
    spool = run.folder / "spool"
    with contextlib.closing(Sidecar(server.routes, run.store, spool=spool, on_event=events.append)) as sidecar:
        sidecar.step()
        assert [event.fields["seq"] for event in events if event.name == "adopted"] == [first.seq]
        for _ in range(16):
            last = run.publish()
        run.publisher.flush()
        sidecar.step()
        assert [path.name for path in spool.glob("hop-*.json")] == [f"hop-{first.seq}-{last.seq}.json"]
        swaps = [event.fields for event in events if event.name == "swapped"]
        assert [(swap["seq"], swap["loaded_anew"]) for swap in swaps] == [(last.seq, 0)]
        assert server.routes.checksums() == runtime_hashes(run.state, ranks)
        run.publish()
        sidecar.step()
        assert server.routes.checksums() == runtime_hashes(run.state, ranks)
    assert "mirror-used" not in [event.name for event in events]
