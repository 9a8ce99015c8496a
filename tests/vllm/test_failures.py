"""Failures with real servers: sidecars, servers and trainers are killed, and updates fail half-way."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import signal
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forked_python import forked_run
from live_server import LiveServer, LiveSidecar, load, wait_until
from tiny_checkpoints import TinyModel, runtime_hashes

from deltawire import Subscriber
from deltawire.chain.log import ChainLog
from deltawire.chain.records.reports import QUARANTINED, SERVING, read_reports
from deltawire.engines.vllm.driver.routes import RouteFailed, VllmRoutes
from deltawire.engines.vllm.driver.sidecar import QUARANTINED_LABEL
from deltawire.store import open_store
from deltawire.store.memory import MemoryStore
from deltawire.testing import FaultyStore

torch = pytest.importorskip("torch", reason="torch is not installed")
killable_trainer = pytest.importorskip("killable_trainer", reason="transformers is not installed")
pytestmark = pytest.mark.slow

DENSE = TinyModel("dense")


def is_at(server: LiveServer, seq: int) -> bool:
    return server.routes.weight_version() == str(seq) and not server.routes.is_paused()


def post(url: str) -> None:
    with urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=300):
        pass


def test_a_new_sidecar_continues_where_a_killed_one_stopped(
    start_run: Callable, serve: Callable[..., LiveServer], follow: Callable[..., LiveSidecar]
) -> None:
    run = start_run(DENSE)
    run.publish(changed=False)
    server = serve(run.checkpoint, ranks=2).wait()
    rng = random.Random(1)
    for _ in range(12):
        sidecar = follow(server.url, run.store)
        wait_until(lambda: bool(sidecar.events("synced")) or bool(sidecar.events("swapped")) or rng.random() < 0.05, "signs of life")  # noqa: B023
        run.publish()
        time.sleep(rng.random() * 0.6)
        sidecar.kill()
    version = run.publish()
    follow(server.url, run.store)
    wait_until(lambda: is_at(server, version.seq), "the newest version")
    assert server.routes.checksums() == runtime_hashes(run.state, 2)
    assert len(server.generate()) == 24


def test_a_server_that_is_killed_comes_back_with_the_newest_version(
    start_run: Callable, serve: Callable[..., LiveServer], follow: Callable[..., LiveSidecar]
) -> None:
    run = start_run(DENSE)
    run.publish(changed=False)
    server = serve(run.checkpoint).wait()
    follow(server.url, run.store)
    for _ in range(3):
        version = run.publish()
    wait_until(lambda: is_at(server, version.seq), "the newest version")
    tokens = server.generate()
    server.kill()
    again = serve(run.checkpoint, port=server.port).wait()  # it starts with the weights from before training
    wait_until(lambda: is_at(again, version.seq), "the newest version")
    assert again.routes.checksums() == runtime_hashes(run.state, 1)
    assert again.generate() == tokens
    version = run.publish()
    wait_until(lambda: is_at(again, version.seq), "the version after that")
    assert again.routes.checksums() == runtime_hashes(run.state, 1)


def test_an_update_that_fails_half_way_in_one_worker_is_reported_and_never_served(
    tmp_path: Path, start_run: Callable, serve: Callable[..., LiveServer], follow: Callable[..., LiveSidecar]
) -> None:
    run = start_run(DENSE)
    run.publish(changed=False)
    faults = tmp_path / "faults.json"
    server = serve(run.checkpoint, ranks=2, environment={"DELTAWIRE_TEST_FAULTS": str(faults)}).wait()
    sidecar = follow(server.url, run.store, "--mirror", run.mirror)
    with open_store(run.store) as store:
        chain = ChainLog(store).run
        for rank in (0, 1):
            version = run.publish()
            wait_until(lambda: is_at(server, version.seq), "a version before the fault")  # noqa: B023
            assert server.routes.checksums() == runtime_hashes(run.state, 2)
            failures = len(sidecar.events("swap-failed"))

            faults.write_text(json.dumps({"apply": [rank], "revert": [rank], "load": [rank]}))
            version = run.publish()
            wait_until(lambda: [report.state for report in read_reports(store, chain)] == [QUARANTINED], f"a report: {sidecar.log_tail()}")
            (report,) = read_reports(store, chain)
            assert f"worker {rank}: RuntimeError: injected" in (report.error or "")
            assert server.routes.weight_version() == QUARANTINED_LABEL
            answers: list[list[int]] = []
            asking = threading.Thread(target=lambda: answers.append(server.generate()))  # noqa: B023
            asking.start()
            wait_until(lambda: len(sidecar.events("swap-failed")) >= failures + 2, "repairs that fail as well")  # noqa: B023
            for route in ("/sleep?level=1&mode=keep", "/wake_up", "/pause?mode=wait"):
                post(server.url + route)
            assert server.routes.is_paused()
            assert all(worker["held"] for worker in server.routes.status())
            assert answers == []

            faults.unlink()
            wait_until(lambda: server.routes.weight_version() == str(version.seq), "a repair")  # noqa: B023
            wait_until(lambda: len(sidecar.events("repaired")) > rank, "the end of the repair")  # noqa: B023
            assert (server.routes.is_paused(), answers) == (True, [])  # by /pause, and no longer because of its weights
            assert not any(worker["held"] for worker in server.routes.status())
            server.routes.resume()
            asking.join()
            assert server.routes.checksums() == runtime_hashes(run.state, 2)
            assert answers == [server.generate()]
            wait_until(lambda: [report.state for report in read_reports(store, chain)] == [SERVING], "a report")
    version = run.publish()
    wait_until(lambda: is_at(server, version.seq), "a version after the faults")
    assert server.routes.checksums() == runtime_hashes(run.state, 2)


def test_a_delta_that_one_worker_cannot_write_is_undone_in_all_of_them(
    tmp_path: Path, start_run: Callable, serve: Callable[..., LiveServer], follow: Callable[..., LiveSidecar]
) -> None:
    run = start_run(DENSE)
    run.publish(changed=False)
    faults = tmp_path / "faults.json"
    server = serve(run.checkpoint, ranks=2, environment={"DELTAWIRE_TEST_FAULTS": str(faults)}).wait()
    before = run.publish()
    sidecar = follow(server.url, run.store)
    wait_until(lambda: is_at(server, before.seq), "a version before the fault")
    for rank in (0, 1):
        hashes, failures = runtime_hashes(run.state, 2), len(sidecar.events("swap-failed"))

        faults.write_text(json.dumps({"apply": [rank]}))
        version = run.publish()
        wait_until(lambda: len(sidecar.events("swap-failed")) > failures, f"a failure: {sidecar.log_tail()}")  # noqa: B023
        assert f"worker {rank}: RuntimeError: injected" in sidecar.events("swap-failed")[failures]["reason"]
        assert server.routes.checksums() == hashes
        assert is_at(server, before.seq)  # it generates with the version before
        faults.unlink()
        wait_until(lambda: is_at(server, version.seq), "the version, after the fault")  # noqa: B023
        assert server.routes.checksums() == runtime_hashes(run.state, 2)
        before = version


@pytest.mark.parametrize(("moment", "rank"), [("staging", 0), ("staging", 1), ("written", 0), ("written", 1)])
def test_a_worker_that_is_killed_in_an_update_is_noticed_and_nothing_wrong_is_served(
    moment: str, rank: int, tmp_path: Path, start_run: Callable, serve: Callable[..., LiveServer], follow: Callable[..., LiveSidecar]
) -> None:
    run = start_run(DENSE)
    before = run.publish(changed=False)
    faults = tmp_path / "faults.json"
    server = serve(run.checkpoint, ranks=2, environment={"DELTAWIRE_TEST_FAULTS": str(faults)}).wait()
    sidecar = follow(server.url, run.store)
    wait_until(lambda: is_at(server, before.seq), f"the first version: {sidecar.log_tail()}")
    wanted = server.generate()
    answers: list[list[int]] = []

    def ask() -> None:
        with contextlib.suppress(
            OSError, ValueError, KeyError, http.client.HTTPException
        ):  # the server ends, perhaps in the middle of an answer
            while True:
                answers.append(server.generate())

    asking = threading.Thread(target=ask)
    asking.start()
    wait_until(lambda: bool(answers), "an answer")
    faults.write_text(json.dumps({f"killed-{moment}": [rank]}))
    version = run.publish()
    wait_until(lambda: bool(sidecar.events("engine-lost") or sidecar.events("swap-failed")), f"a report: {sidecar.log_tail()}")
    server.kill()  # one that has lost a worker may never answer
    asking.join()
    assert all(answer == wanted for answer in answers)

    faults.unlink()
    again = serve(run.checkpoint, ranks=2, port=server.port).wait()
    wait_until(lambda: is_at(again, version.seq), f"the version: {sidecar.log_tail()}")
    assert again.routes.checksums() == runtime_hashes(run.state, 2)


def refuse_wrong_values(routes: VllmRoutes, settings: dict[str, Any]) -> None:
    """Check that wrong settings and arguments change nothing, and that no worker answers the next call with what belongs to another."""
    checksums, before = routes.checksums(), routes.status()
    wrong: list[dict[str, Any]] = [{"trusted_keys": ["nonsense"]}, {"spool": 5}, {"gpu_share": 0}, {"unknown": 1}]
    for setting in wrong:
        with pytest.raises(RouteFailed):
            routes.initialise({**settings, **setting})
        assert routes.checksums() == checksums, setting
        told = routes.status()
        assert [(worker["seq"], worker["live"], worker["initialised"]) for worker in told] == [
            (worker["seq"], worker["live"], True) for worker in before
        ], setting
        assert all(worker["error"] for worker in told), setting
    calls = [("prepare", "x"), ("prepare",), ("prepare", 1, 2), ("adopt", "x"), ("learn", 5), ("take_experts", 5)]
    for method, *arguments in calls:
        told = routes.call_workers(f"deltawire_{method}", *arguments)
        assert [worker["outcome"] for worker in told] == ["refused", "refused"], method
        assert all(method in worker["error"] for worker in told)
        assert routes.checksums() == checksums


def test_a_trainer_can_drive_the_routes_and_an_unavailable_version_changes_nothing(
    start_run: Callable, serve: Callable[..., LiveServer]
) -> None:
    run = start_run(DENSE)
    version = run.publish(changed=False)
    server = serve(run.checkpoint, ranks=2).wait()
    routes = server.routes
    routes.initialise({"spool": str(run.folder / "spool"), "url": run.store, "confirm": "everything"})

    def update(seq: int) -> None:
        routes.pause("abort", clear_cache=True)
        routes.start_update()
        routes.update(seq)
        routes.finish_update(str(seq))
        routes.resume()

    update(version.seq)
    for prepared in (True, False):
        version = run.publish()
        if prepared:
            routes.prepare(version.seq)
            wait_until(lambda: all(worker["staged"] == version.seq for worker in routes.status()), "staging")  # noqa: B023
        update(version.seq)
        assert routes.checksums() == runtime_hashes(run.state, 2)

    routes.pause("keep", clear_cache=False)
    routes.start_update()
    with pytest.raises(RouteFailed):
        routes.update(version.seq + 1)
    assert [worker["quarantined"] for worker in routes.settle()] == [False, False]
    routes.start_update()
    with pytest.raises(RouteFailed, match="seq must be"):
        routes.update("x")  # type: ignore[arg-type]
    assert [worker["quarantined"] for worker in routes.settle()] == [False, False]
    routes.resume()
    assert routes.checksums() == runtime_hashes(run.state, 2)
    refuse_wrong_values(routes, {"spool": str(run.folder / "spool"), "url": run.store})
    version = run.publish()
    update(version.seq)
    assert routes.checksums() == runtime_hashes(run.state, 2)

    # A NaN and the sign of zero change.
    bits = run.state["model.layers.0.self_attn.o_proj.weight"].reshape(-1).view("u2")
    bits[:4] = [0x7FC1, 0xFF81, 0x8000, 0x0000]
    version = run.publish(changed=False)
    update(version.seq)
    assert routes.checksums() == runtime_hashes(run.state, 2)
    assert [worker["last"]["loaded_anew"] for worker in routes.status()] == [0, 0]
    update(version.seq - 1)  # this is an older version
    bits[:4] = 0
    with Subscriber(run.store) as reader:
        reader.sync(seq=version.seq - 1)
        assert routes.checksums() == runtime_hashes(dict(reader.state), 2)


def test_a_server_has_exact_weights_after_its_trainer_was_killed_several_times(
    tmp_path: Path, serve: Callable[..., LiveServer], follow: Callable[..., LiveSidecar]
) -> None:
    """Trainer, sidecar and server are processes that share only a store. The server answers requests during the whole test."""
    steps = 12
    model = DENSE.save(tmp_path / "model", DENSE.state())
    store = str(tmp_path / "store")
    expected: dict[str, Any] = {}
    whole = FaultyStore(MemoryStore())
    killable_trainer.train(model, whole, tmp_path / "undisturbed", steps, lambda step, weights: expected.update(_arrays(weights)))
    calls = len(whole.calls)
    # The first trainer makes steps, and the second dies while it takes over. The others continue from a checkpoint, and have fewer steps
    # left.
    moments = [calls // 3, 9, calls // 4, 3, calls // 5]

    server = serve(model).wait()
    follow(server.url, store, "--confirm", "everything")
    command = [killable_trainer.__file__, model, store, tmp_path / "checkpoints", steps]
    ended: list[int] = []
    with load(server, ended):
        assert [forked_run("torch", [*command, moment]).returncode for moment in moments] == [-signal.SIGKILL] * len(moments)
        assert forked_run("torch", command).returncode == 0
        with Subscriber(store) as reader:
            newest = reader.sync()
        wait_until(lambda: is_at(server, newest.seq), "the newest version")
    assert newest.step == steps
    assert server.routes.checksums() == runtime_hashes(expected, 1)
    assert ended
    assert set(ended) == {150}  # no request was lost


def _arrays(weights: Any) -> dict[str, Any]:
    return {name: tensor.contiguous().view(torch.int16).numpy().copy() for name, tensor in weights.items()}
