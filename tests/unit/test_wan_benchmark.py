"""The parts of `make bench-wan` that need neither root nor a network: options, the loop of generation, and tables."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import deltawire
from deltawire.chain.log import ChainLog
from deltawire.errors import DataDamaged, ObjectMissing
from deltawire.store.memory import MemoryStore

pytest.importorskip("zstandard")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from wan import __main__ as program
from wan import network, scenarios, tables
from wan.emulated_stores import RegionsStore, TrainersStore
from wan.emulation import Arrival, Transfer
from wan.generation import Loop, Progress, ideal, replay
from wan.link_check import LinkCheck
from wan.measured import BOUND, DELTAWIRE, FULL, XOR, Ablation, Codec, Update, bound, mean, scaled
from wan.network import Shape
from wan.options import QUICK, Options, parse
from wan.scenarios import Fetch, LoopRun
from wan.staged_replica import StagedReplica

LOOP = Loop(regions=3, speed=2_500, generation=20, training=10)


def update(method: str = DELTAWIRE, *, transfer: float = 1.0, weights: float = 8e9, rate: float = 1e9, pause: float = 0.0) -> Update:
    nbytes = 2 * weights if method == FULL else 75e6
    return Update(method, weights, rate, nbytes, [nbytes] * 3, 0.5, [transfer] * 3, [0.25] * 3, [pause] * 3)


def share(transfers: Sequence[float], *, publish: float = 0.0, pause: float = 0.0, loop: Loop = LOOP) -> float:
    return replay(loop, publish, transfers, [pause] * 3, 20) / ideal(loop)


def test_an_ideal_network_lets_every_region_work_all_the_time() -> None:
    assert ideal(LOOP) == pytest.approx(3 * 2_500)


def test_training_that_is_slower_than_generation_bounds_the_loop() -> None:
    assert ideal(Loop(3, 2_500, generation=20, training=30)) == pytest.approx(3 * 2_500 * 20 / 30)


def test_transfers_hide_behind_generation_until_they_are_too_long() -> None:
    assert share([9.9, 1, 0]) == pytest.approx(1)
    assert share([10.5] * 3) < 1


def test_long_transfers_bound_the_loop_by_themselves() -> None:
    assert share([100] * 3) == pytest.approx(20 / 100)


def test_a_slow_region_leaves_the_work_to_the_others() -> None:
    assert share([1, 1, 1_000]) == pytest.approx(2 / 3, abs=0.01)


def test_without_staleness_each_step_waits_for_training_and_transfer() -> None:
    loop = Loop(3, 2_500, 20, 10, staleness=0)
    assert ideal(loop) == pytest.approx(3 * 2_500 * 20 / 30)
    assert share([5] * 3, publish=1, loop=loop) == pytest.approx(30 / 36)


def test_a_region_makes_no_tokens_while_its_weights_are_written() -> None:
    assert share([1] * 3, pause=1) == pytest.approx(20 / 21)


def test_progress_counts_only_weights_that_staleness_admits() -> None:
    progress = Progress(LOOP, 0.0)
    progress.advance(40)
    assert progress.completed == [20, 40]
    progress.advance(50)
    assert progress.tokens == 2 * LOOP.batch
    progress.serve(0, 1, 50)
    progress.advance(60)
    assert progress.tokens == 2 * LOOP.batch + 25_000


def test_means_and_scaled_transfers() -> None:
    both = mean([update(transfer=1), update(transfer=3)])
    assert both.serves == [2.5] * 3
    assert both.links == [1.75] * 3
    larger = scaled(update(FULL, transfer=10, weights=1e9), 8e9, 16e9)
    assert larger.is_computed
    assert larger.transfers == [80] * 3
    assert larger.goodputs() == pytest.approx(scaled(larger, 1e9, 2e9).goodputs())


def test_tables_hold_every_method_and_the_goals() -> None:
    found = [update(FULL, transfer=140), bound(8e9, 16e9, 1e9, 3), update(XOR, transfer=3), update(transfer=2)]
    text = tables.updates(found).markdown()
    assert [row[2] for row in tables.updates(found).rows] == [FULL, f"{BOUND} *", XOR, DELTAWIRE]
    assert [row[8] for row in tables.updates(found).rows][:2] == ["140.50", "128.00"]
    assert "- met: 8.0 B at 1 Gbit/s, 20 s of generation: at least 2.4 times the tokens of full weights" in text
    assert "100.0%" in text
    assert "- met: 8.0 B at 1 Gbit/s, 60 s of generation: at least 98%" in text
    assert "*" not in tables.updates(found).rows[0][2]
    assert tables.updates([scaled(found[0], 8e9, 16e9)]).rows[0][2] == f"{FULL} *"
    slow = tables.updates([update(transfer=500)])
    assert [met for _, met in slow.checks] == [False]


def test_the_table_of_the_loop_compares_methods_of_the_same_size() -> None:
    run = LoopRun(LOOP, 7_400.0, [0.0, 20.0], [update(pause=0.1)])
    table = tables.loop(run, [update(FULL, transfer=100), update(XOR, weights=1e9)])
    assert [row[0] for row in table.rows] == ["a network that costs nothing", DELTAWIRE, FULL]
    assert [met for _, met in table.checks] == [True]


def test_tables_of_links_and_ablations() -> None:
    rows = tables.links([(Shape(1e9, 0.08), LinkCheck(0.0801, 6.5e8, 9.2e8))]).rows
    assert rows == [["1 Gbit/s, 80 ms", "80.1 ms", "650 Mbit/s", "920 Mbit/s"]]
    relayed = replace(update(transfer=2), link_bytes=[75e6, 76e6, 75e6])
    [row] = tables.ablations([Ablation("a relay", replace(relayed, link_bytes=[304e6] * 3, transfers=[5.0] * 3), relayed)]).rows
    assert row[2:4] == ["304.0 MB", "76.0 MB"]
    assert float(row[-1].rstrip("%")) > 0


def test_the_ablations_can_be_measured_alone() -> None:
    found = parse(["--only-ablations", "--no-keep", "--rates", "0.25,1"])
    assert (found.only_ablations, found.keep, min(found.rates)) == (True, False, 0.25e9)
    with pytest.raises(SystemExit):
        parse(["--only-ablations", "--no-ablations"])


def test_the_table_of_the_model_compares_it_with_each_region() -> None:
    found = [Fetch("files of a delta", Shape(1e9, rtt), 60, 75e6, 2.0) for rtt in (0.03, 0.15)]
    [row] = tables.model(found).rows
    assert row[0] == "files of a delta, 75.0 MB in 60 objects"
    assert row[2] == "2.00 / 2.00"
    near, far = (float(each) for each in row[3].split(" / "))
    assert near < far


def test_the_times_of_codecs_grow_with_the_weights_and_are_those_of_the_method() -> None:
    block = {"encode": 0.1, "decode": 0.2, "xor_encode": 0.5, "xor_decode": 0.7}
    assert Codec.measured(block, 60, 8.2e9, DELTAWIRE) == Codec(6.0, 12.0, pytest.approx(0.0098))
    assert Codec.measured(block, 30, 4.1e9, XOR) == Codec(15.0, 21.0, pytest.approx(0.0049))


def transfer(seconds: float, decode: float = 0.0) -> Transfer:
    arrivals = [Arrival(None, seconds, 100, phases={"decode_seconds": decode}) for _ in range(3)]  # type: ignore[arg-type]
    return Transfer(0.0, 0.0, 100, arrivals, {"encode_seconds": 2.0, "upload_seconds": 3.0})


def test_every_method_is_charged_its_upload_and_its_codec() -> None:
    found = scenarios._plain(XOR, [transfer(4.0), transfer(6.0)], 1, 1e9, Codec(decode=7.0, swap=0.5))
    assert (found.publish, found.transfers, found.decode, found.pauses) == (3.0, [7.0] * 3, [2.0] * 3, [0.5] * 3)
    assert found.serves == [10.5] * 3
    decoded = scenarios._plain(XOR, [transfer(4.0, decode=1.5)], 1, 1e9)
    assert (decoded.links, decoded.decode) == ([2.5] * 3, [1.5] * 3)
    arrivals = [Arrival(None, 9.0, 100, swap_begin=8.0, phases={"resolve_seconds": 0.25}) for _ in range(3)]  # type: ignore[arg-type]
    own = scenarios._update(Transfer(1.0, 2.0, 100, arrivals), 1, 1e9, Codec(encode=3.0, decode=10.0, swap=0.5))
    assert (own.publish, own.transfers, own.decode, own.pauses) == (3.0, [10.0] * 3, [4.0] * 3, [1.5] * 3)


def state(seed: int) -> dict[str, npt.NDArray[np.float32]]:
    return {f"tensor{index}": np.full(1000, seed + index, np.float32) for index in range(4)}


def test_versions_that_are_encoded_ahead_are_stored_when_they_are_released() -> None:
    memory = MemoryStore()
    store = TrainersStore(memory, checkpoint_bytes=1 << 30)
    with deltawire.Publisher(store, "wan", attachments={}, options=deltawire.WriterOptions(skips=False)) as publisher:
        publisher.publish(state(0), step=0)
        before = {entry.key for entry in memory.list("")}
        store.holds = True
        for step in (1, 2):
            publisher.publish(state(step), step=step)
        assert {entry.key for entry in memory.list("")} == before
        with deltawire.Subscriber(memory) as subscriber:
            for step in (1, 2):
                store.release()
                assert subscriber.sync().step == step
                assert all(np.array_equal(subscriber.state[name], tensor) for name, tensor in state(step).items())


def test_the_first_version_is_not_stored_but_regions_have_it() -> None:
    memory = MemoryStore()
    with deltawire.Publisher(TrainersStore(memory, checkpoint_bytes=1), "wan", attachments={}) as publisher:
        publisher.publish(state(0), step=0)
        first = ChainLog(memory).read(1)
    assert first is not None
    [file] = first.files
    with pytest.raises(ObjectMissing):
        memory.head(file.key)
    assert RegionsStore(memory, {file.key: file.size}).head(file.key).size == file.size
    with pytest.raises(ObjectMissing):
        RegionsStore(memory, {}).head(file.key)


def test_a_staged_replica_fetches_and_checks_every_version() -> None:
    memory = MemoryStore()
    with deltawire.Publisher(memory, "wan", attachments={}) as publisher:
        publisher.publish(state(0), step=0)
        first = ChainLog(memory).read(1)
        assert first is not None
        with deltawire.Subscriber(memory, replica=StagedReplica(first)) as subscriber:
            publisher.publish(state(1), step=1)
            assert subscriber.sync().step == 1
            publisher.publish(state(2), step=2)
            newest = ChainLog(memory).head()
            assert newest is not None
            memory.delete([newest.files[0].key])
            memory.put(newest.files[0].key, bytes(newest.files[0].size))
            with pytest.raises(DataDamaged):
                subscriber.sync()


def test_options() -> None:
    assert parse([]) == Options()
    assert parse(["--quick"]) == QUICK
    assert parse(["--rates", "0.5,1", "--sizes", "4"]).rates == (0.5e9, 1e9)
    options = parse(["--longest-full", "20"])
    assert options.runs_full(2e9, 1e9)
    assert not options.runs_full(2e9, 0.25e9)
    assert options.runs_full(16e9, 1e9)
    assert not parse(["--no-long-full"]).runs_full(16e9, 1e9)
    small, middle = 8 * 2.0**28, 30 * 2.0**28  # bytes of 1.07 B and 4.03 B weights
    assert [Options().runs_full(small, rate) for rate in Options().rates] == [True] * 4
    assert [Options().runs_full(middle, rate) for rate in Options().rates] == [False, False, True, True]


@pytest.mark.parametrize("arguments", [["--rates", "fast"], ["--sizes", "0"], ["--versions", "0"], ["--sizes", "inf"]])
def test_options_that_make_no_sense_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(arguments)
    assert "make bench-wan" in capsys.readouterr().err


def test_without_root_it_says_what_it_needs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(network.os, "geteuid", lambda: 1000)
    assert program.main(["--quick"]) == 1
    assert "Network namespaces need root" in capsys.readouterr().err
