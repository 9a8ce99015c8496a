"""Tests of everything that a `deltawire.engines.Engine` must guarantee. Subclass `EngineConformance` in a test file and provide an engine:

class TestMyEngine(EngineConformance):
    @pytest.fixture
    def rig(self):
        return MyRig()

The tests publish versions to a store in memory and drive the engine with `HotSwap`. They inject failures at every step of a swap.
"""

from __future__ import annotations

import abc
import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from ..chain.reader_options import ReaderOptions
from ..chain.version import Version
from ..engines import Engine, HotSwap, KvCache, PreparedSwap, Swap
from ..errors import EngineQuarantined, EngineUnavailable, SwapFailed
from ..publish import Publisher
from ..store.memory import MemoryStore
from ..subscribe.replica import Replica
from ..tensors.bits import Tensor
from ..tensors.state import state_digest

VERSIONS = 6


class EngineRig(abc.ABC):
    """An engine, and the means to observe it from outside. Each test gets a new one."""

    engine: Engine

    @abc.abstractmethod
    def state(self, number: int) -> Mapping[str, Tensor]:
        """Return the weights of the test's version `number`. They must be the same in each call, and differ for each number.

        Parameters
        ----------
        number
            The number of the version, from 0 to 5.
        """

    @abc.abstractmethod
    def weights(self) -> Mapping[str, Tensor]:
        """Return the weights that the engine has now, under the names of `state`."""

    @abc.abstractmethod
    def generate(self) -> object:
        """Compute something with the weights, if possible with all of them. Waits while the engine is paused.

        The result must be equal for equal weights, and different for different weights.
        """


class EngineConformance:
    """The tests. A subclass must provide the fixture `rig`."""

    @pytest.fixture
    def rig(self) -> EngineRig:
        raise NotImplementedError("a subclass of EngineConformance must provide the fixture rig")

    @pytest.fixture
    def run(self, rig: EngineRig) -> Iterator[Run]:
        with contextlib.closing(Run(rig)) as run:
            yield run

    def test_every_version_arrives_bit_for_bit(self, run: Run) -> None:
        for number in range(VERSIONS):
            run.publish(number)
            run.check(number)

    def test_an_engine_that_is_behind_gets_to_the_newest_version(self, run: Run) -> None:
        run.publish(0)
        run.swap.sync()
        for number in range(1, VERSIONS):
            run.publish(number)
        run.check(VERSIONS - 1)

    def test_an_engine_goes_back_on_request_and_when_training_resumes_from_an_older_version(self, run: Run) -> None:
        seqs = []
        for number in range(3):
            seqs.append(run.publish(number))
            run.swap.sync()
        assert run.swap.sync(seq=seqs[0]).seq == seqs[0]
        run.check_weights(0)
        run.check(2)
        run.resume_training_from(seqs[1])
        run.check(1)

    @pytest.mark.parametrize("moment", ["before apply", "after apply", "in confirm"])
    @pytest.mark.parametrize("versions", [1, 3])
    def test_a_swap_that_fails_is_reverted_and_tried_again(self, run: Run, moment: str, versions: int) -> None:
        for number in range(versions):
            run.publish(number)
            run.check(number)
        answer = run.rig.generate()
        run.publish(versions)
        run.faults.moment = moment
        with pytest.raises(SwapFailed):
            run.swap.sync()
        assert run.rig.generate() == answer
        run.check_weights(versions - 1)
        assert run.swap.version is not None
        assert run.swap.version.step == versions - 1
        run.faults.moment = ""
        run.check(versions)

    def test_an_engine_whose_swap_and_revert_both_fail_stays_paused_until_it_is_repaired(self, run: Run) -> None:
        run.publish(0)
        run.swap.sync()
        run.publish(1)
        run.faults.moment = "after apply, and in revert"
        with pytest.raises(EngineQuarantined):
            run.swap.sync()
        assert run.swap.is_quarantined
        assert run.swap.version is None
        with run.generating() as answered:
            assert not answered.wait(0.2)  # paused: unknown weights generate nothing
            with pytest.raises(EngineQuarantined):
                run.swap.sync()
            assert not answered.wait(0.2)
            run.faults.moment = ""
            run.check(1)
            assert not run.swap.is_quarantined
            assert answered.wait(60)

    def test_an_engine_that_does_not_pause_keeps_its_version(self, run: Run) -> None:
        run.publish(0)
        run.swap.sync()
        run.publish(1)
        run.faults.moment = "in pause"
        with pytest.raises(EngineUnavailable):
            run.swap.sync()
        run.rig.generate()
        run.check_weights(0)
        run.faults.moment = ""
        run.check(1)

    def test_an_engine_that_does_not_resume_has_the_new_version_and_is_resumed_later(self, run: Run) -> None:
        run.publish(0)
        run.swap.sync()
        run.publish(1)
        run.faults.moment = "in resume"
        with pytest.raises(EngineUnavailable):
            run.swap.sync()
        run.check_weights(1)
        with pytest.raises(EngineUnavailable):
            run.swap.sync()
        run.faults.moment = ""
        run.check(1)
        run.rig.generate()

    def test_pausing_and_resuming_may_be_repeated(self, rig: EngineRig) -> None:
        rig.engine.resume()
        for kv_cache in KvCache:
            rig.engine.pause(kv_cache)
            rig.engine.pause(kv_cache)
            rig.engine.resume()
            rig.engine.resume()
        rig.generate()

    @pytest.mark.parametrize("kv_cache", list(KvCache))
    def test_nothing_is_generated_while_it_is_paused_and_nothing_is_lost(self, run: Run, kv_cache: KvCache) -> None:
        run.rig.engine.pause(kv_cache)
        try:
            with run.generating() as answered:
                assert not answered.wait(0.2)
                run.rig.engine.resume()
                assert answered.wait(60)
        finally:
            run.rig.engine.resume()

    def test_generations_during_swaps_are_made_by_complete_versions_and_attributed_to_them(self, run: Run) -> None:
        answers: dict[int | None, object] = {}
        for number in range(VERSIONS):
            run.publish(number)
            step = run.swap.sync().step
            answers[step] = run.rig.generate()
        assert len(set(map(repr, answers.values()))) == VERSIONS, "the rig gives equal answers for different versions"
        over = threading.Event()
        wrong: list[str] = []
        made: list[int] = []

        def generate() -> None:
            while not over.is_set():
                with run.swap.generation() as made_by:
                    answer = run.rig.generate()
                steps = [version.step for version in made_by.versions if version is not None]
                made.append(len(steps))
                if answer not in [answers[step] for step in steps]:
                    known = [step for step, known in answers.items() if known == answer]
                    wrong.append(f"an answer of version {known}, attributed to {steps}")

        threads = [threading.Thread(target=generate) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            seqs = [seq for seq, _ in run.published]
            for seq in [*seqs[::-1], *seqs]:
                run.swap.sync(seq=seq)
        finally:
            over.set()
            for thread in threads:
                thread.join(60)
        assert not wrong, wrong[0]
        assert made


class Run:
    """A chain in memory, an engine that follows it, and failures to inject."""

    def __init__(self, rig: EngineRig) -> None:
        self.rig = rig
        self.faults = Faults(rig.engine)
        self.store = MemoryStore()
        self.publisher = Publisher(self.store)
        self.swap = HotSwap(self.store, self.faults, options=ReaderOptions(pin=False))
        self.published: list[tuple[int, int]] = []
        """For each version, the number of its commit and of its state."""

    def publish(self, number: int) -> int:
        version: Any = self.publisher.publish(self.rig.state(number), step=number)
        self.published.append((version.seq, number))
        return int(version.seq)

    def resume_training_from(self, seq: int) -> None:
        self.publisher.close()
        self.publisher = Publisher(self.store, resume_from_seq=seq)

    def check(self, number: int) -> None:
        """Sync, and check that the engine has this state."""
        version = self.swap.sync()
        assert version.step == number
        assert version == self.swap.version
        self.check_weights(number)
        self.rig.generate()

    def check_weights(self, number: int) -> None:
        assert state_digest(self.rig.weights()) == state_digest(self.rig.state(number))

    @contextlib.contextmanager
    def generating(self) -> Iterator[threading.Event]:
        """Generate on another thread while the context lasts. The event is set when the generation is done."""
        answered = threading.Event()

        def generate() -> None:
            self.rig.generate()
            answered.set()

        thread = threading.Thread(target=generate, daemon=True)
        thread.start()
        yield answered
        thread.join(60)

    def close(self) -> None:
        self.faults.moment = ""
        self.swap.close()
        self.publisher.close()


class Faults(Engine):
    """An engine whose swaps fail at the moment that a test chooses."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.name = engine.name
        self.moment = ""

    def replica(self, swap: Swap) -> Replica:
        def make(prepared: PreparedSwap, version: Version) -> None:
            swap(FaultySwap(prepared, self.fail_at), version)

        return self._engine.replica(make)

    def pause(self, kv_cache: KvCache) -> None:
        self._engine.pause(kv_cache)
        self.fail_at("in pause")

    def resume(self) -> None:
        self.fail_at("in resume")
        self._engine.resume()

    def generation(self) -> contextlib.AbstractContextManager[None]:
        return self._engine.generation()

    def close(self) -> None:
        self._engine.close()

    def fail_at(self, *moments: str) -> None:
        if self.moment in moments:
            raise RuntimeError(f"injected {self.moment}")


class FaultySwap:
    """A prepared swap that fails at the moment that a test chooses."""

    def __init__(self, prepared: PreparedSwap, fail_at: Callable[..., None]) -> None:
        self._prepared = prepared
        self._fail_at = fail_at

    def apply(self) -> None:
        self._fail_at("before apply")
        self._prepared.apply()
        self._fail_at("after apply", "after apply, and in revert")

    def confirm(self, *, full: bool) -> None:
        self._prepared.confirm(full=full)
        self._fail_at("in confirm")

    def revert(self) -> None:
        self._fail_at("after apply, and in revert")
        self._prepared.revert()
