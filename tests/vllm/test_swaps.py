"""A real server and a real sidecar swap twenty versions, one after the other: four under load, and the others while the server is idle."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import pytest
from live_server import LiveServer, LiveSidecar, load, wait_until
from model_memory import difference
from tiny_checkpoints import TinyMla, TinyModel, runtime_hashes

from deltawire.chain.log import ChainLog
from deltawire.chain.records.reports import SERVING, read_reports
from deltawire.engines.vllm.driver.canary import check_decoding
from deltawire.store import open_store

pytestmark = pytest.mark.slow

SYNCS = 20
LOADED = 4
"""The number of syncs during which clients keep the server busy. Generating tokens takes most of the time of these tests."""
MEMORY = "deltawire_test_memory"
EVERY_SYNC = bool(os.environ.get("DELTAWIRE_TEST_EVERY_SYNC"))


@dataclass(frozen=True)
class Served:
    """A model, how it is quantised, and what its server needs. With a canary, the sidecar checks the server's results after each swap."""

    model: TinyModel
    ranks: int = 1
    recipe: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: Sequence[str] = ()
    has_canary: bool = False


SERVED = {
    "dense-tp1": Served(TinyModel("dense"), has_canary=True),
    "tied-tp2": Served(TinyModel("tied", tied=True), 2),
    "moe-tp1": Served(TinyModel("moe", experts=4)),
    "moe-tp2": Served(TinyModel("moe", experts=4), 2),
    "mla-tp1": Served(TinyMla("mla", layers=1), arguments=("--block-size", "16")),
    "mla-tp2": Served(TinyMla("mla", layers=1), 2, arguments=("--block-size", "16")),
    "fp8-block-tp1": Served(TinyModel("quantised", scale=4, layers=1), 1, "fp8-block", {"DELTAWIRE_TEST_FP8_BLOCK": "1"}),
    "fp8-channel-tp1": Served(TinyModel("quantised", scale=4, layers=1), 1, "fp8-channel"),
    "int4-tp2": Served(TinyModel("quantised", scale=4, layers=1), 2, "int4"),
}
ALWAYS = ("dense-tp1", "tied-tp2", "moe-tp2", "mla-tp1", "int4-tp2")
"""Those that every run of the tests starts. test_layout_matrix.py compares all layouts, on one rank and on two, without servers."""


def compared(model: TinyModel, ranks: int) -> list[int]:
    """Return the syncs after which a fresh server is started for comparison. Each comparison takes seconds.

    For a model without experts, the test computes the expected memory after every sync, so one comparison at the end is enough. A model
    with experts on several ranks is also compared after the syncs under load.
    """
    return list(range(1, SYNCS + 1)) if EVERY_SYNC else [LOADED, SYNCS] if model.experts and ranks > 1 else [SYNCS]


@pytest.mark.parametrize("case", SERVED if EVERY_SYNC else ALWAYS)
def test_after_each_of_twenty_swaps_every_tensor_is_that_of_a_fresh_load(
    case: str, start_run: Callable, serve: Callable[..., LiveServer], follow: Callable[..., LiveSidecar]
) -> None:
    served = SERVED[case]
    model, ranks = served.model, served.ranks
    is_plain = not model.experts and served.recipe is None and not isinstance(model, TinyMla)
    options = {"ranks": ranks, "environment": served.environment, "arguments": served.arguments}
    run = start_run(model, served.recipe)
    run.publish(changed=False)
    server = serve(run.checkpoint if served.recipe is None else run.saved(), **options)
    server.wait()
    assert server.routes.weight_version() == "default"
    usual = check_decoding(server.routes, most_difference=math.inf, most_mean=math.inf)
    sidecar = follow(server.url, run.store, *(("--canary", "self") if served.has_canary else ()))
    ended: list[int] = []
    done = 0
    for last in sorted({LOADED, *compared(model, ranks)}):
        with load(server, ended) if last <= LOADED else contextlib.nullcontext():
            for sync in range(done, last):
                version = run.publish()
                wait_until(lambda: server.routes.weight_version() == str(version.seq), f"sync {sync}: {sidecar.log_tail()}")  # noqa: B023
                if is_plain:
                    assert server.routes.checksums() == runtime_hashes(run.state, ranks)
        done = last
        if last in compared(model, ranks):
            fresh = serve(run.saved(), **options).wait()
            for held, wanted in zip(server.routes.call_workers(MEMORY), fresh.routes.call_workers(MEMORY), strict=True):
                assert difference(held, wanted) == []
            assert server.generate() == fresh.generate()
            fresh.kill()
    swaps = sidecar.events("swapped")
    assert len(swaps) == SYNCS or len(swaps) == SYNCS + 1  # the first two versions may be swapped together
    assert [swap["loaded_anew"] for swap in swaps[1:]] == [0] * (len(swaps) - 1)
    check_decoding(server.routes, usual=usual)
    if served.has_canary:
        passed = [swap["seq"] for swap in swaps]
        wait_until(lambda: [event["seq"] for event in sidecar.events("canary-passed")] == passed, sidecar.log_tail())
    assert len(ended) >= 2
    assert set(ended) == {150}  # every request got all of its tokens
    assert not sidecar.events("engine-quarantined")
    assert not sidecar.events("mirror-used")
    with open_store(run.store) as store:
        (report,) = read_reports(store, ChainLog(store).run)
        assert (report.state, report.seq) == (SERVING, version.seq)
