"""The backend updates the memory of models that vLLM loads in this process: after each update it is that of a fresh load, bit for bit."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loaded_models import load_model, publish, start_backend
from model_memory import addresses, difference, memory
from tiny_checkpoints import State, TinyModel, train

from deltawire import Subscriber
from deltawire.chain.reader_options import ReaderOptions
from deltawire.chain.routes.remaining_routes import Routes
from deltawire.dtypes import dtype_named
from deltawire.errors import EngineRefused
from deltawire.format.records.record_parts import CommitRef
from deltawire.store import open_store
from deltawire.subscribe.spool.delta_spool import DeltaSpool
from deltawire.subscribe.sync_context import SyncContext
from deltawire.subscribe.tensor_table import TensorSpec, read_tensor_table, write_table
from deltawire.warnings import LayoutChanged

pytestmark = pytest.mark.slow

CASES: dict[str, tuple[TinyModel, str | None]] = {
    "dense": (TinyModel("dense", layers=1), None),
    "int4": (TinyModel("q", scale=4, layers=1), "int4"),  # the shapes of packed weights cannot be read from the model's memory
}


class Chain:
    """Versions of a model, and the spool that a sidecar would fill."""

    def __init__(
        self, folder: Path, model: TinyModel, recipe: str | None, versions: int = 3, *, join: Callable[[State], State] = dict
    ) -> None:
        self.states: list[State] = [model.state()]
        for number in range(1, versions):
            self.states.append({name: tensor.copy() for name, tensor in self.states[-1].items()})
            train(self.states[-1], np.random.default_rng(number), 0.05)
        self.url, self.checkpoints = publish(folder, model, [join(state) for state in self.states], recipe)
        self.log = ReaderOptions().open_log(open_store(self.url))
        self.spool = DeltaSpool(folder / "spool")
        context = self._context()
        head = self.log.head()
        assert head is not None
        self.commits = [commit for commit in (self.log.read(seq) for seq in range(head.seq + 1)) if commit and commit.kind != "fence"]
        write_table(self.spool.table_path, read_tensor_table(context, context.routes.find(None, self.commits[0])[0]))

    def _context(self) -> SyncContext:
        return SyncContext(self.log, Routes(self.log), patience=0)

    def ref(self, number: int) -> CommitRef:
        return self.log.ref(self.commits[number])

    def put(self, number: int) -> int:
        """Put the hop to a version into the spool. Returns the number of its commit."""
        context = self._context()
        (hop,) = context.routes.find(self.ref(number - 1), self.commits[number])
        self.spool.put(hop, context)
        return self.commits[number].seq


def wait_until_staged(backend: Any, seq: int) -> None:
    backend._updates._staging._future.exception()
    status = backend.status()
    assert status["staged"] == seq, status["staging_error"]


@pytest.mark.parametrize("case", CASES)
def test_updates_of_live_memory_equal_a_fresh_load(case: str, tmp_path: Path) -> None:
    chain = Chain(tmp_path, *CASES[case])
    loaded = load_model(chain.checkpoints[0])
    places = addresses(loaded.model)
    backend = start_backend(loaded, spool=str(chain.spool.folder))
    with loaded.active():
        status = backend.learn(str(chain.spool.table_path))
    assert status["live"], status["why_not"]
    assert chain.commits[0].digest is not None
    assert status["digest"] == chain.commits[0].digest.hex()
    assert backend.adopt(chain.ref(1).plain())["seq"] is None  # these are not the weights of that version
    assert backend.adopt(chain.ref(0).plain())["seq"] == chain.commits[0].seq
    for number in range(1, len(chain.commits)):
        seq = chain.put(number)
        backend.prepare(seq)
        wait_until_staged(backend, seq)
        with loaded.active():
            answer = backend.swap(seq)
        assert answer["outcome"] == "made", answer["error"]
        assert answer["seq"] == seq
        assert answer["last"]["loaded_anew"] == 0
    assert not difference(memory(loaded.model), memory(load_model(chain.checkpoints[-1]).model))
    assert addresses(loaded.model) == places
    with loaded.active():
        last = chain.ref(-1)
        assert last.digest is not None
        assert backend.learn(str(chain.spool.table_path))["digest"] == last.digest.hex()
        next(loaded.model.parameters()).data.view(-1)[:1].neg_()  # other code writes
        assert backend.learn(str(chain.spool.table_path))["digest"] != last.digest.hex()
    backend.shutdown()


def test_the_staging_thread_frees_the_memory_of_an_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from deltawire.engines.vllm.live.layout_update import LayoutUpdate

    freed_by: list[str] = []
    monkeypatch.setattr(LayoutUpdate, "__del__", lambda _: freed_by.append(threading.current_thread().name), raising=False)
    chain = Chain(tmp_path, *CASES["dense"], versions=2)
    loaded = load_model(chain.checkpoints[0])
    backend = start_backend(loaded, spool=str(chain.spool.folder))
    with loaded.active():
        backend.learn(str(chain.spool.table_path))
        backend.adopt(chain.ref(0).plain())
        assert backend.swap(chain.put(1))["outcome"] == "made"
    backend.shutdown()
    assert freed_by == ["deltawire-stage_0"]


def loads_in(status: Any) -> Any:
    return status["last"].get("loaded_anew")


def mirrored(chain: Chain, folder: Path, number: int) -> str:
    """Bring a mirror to a version, as the sidecar does. Returns its directory."""
    with Subscriber(chain.url, folder / "mirror", options=ReaderOptions(pin=False)) as subscriber:
        subscriber.sync(seq=chain.commits[number].seq)
    return str(folder / "mirror")


def test_a_server_that_loads_from_the_mirror_continues_in_live_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The version that the server started with is not in the chain. So the first update loads everything, from the mirror."""
    chain = Chain(tmp_path, *CASES["dense"], versions=4)
    model, _ = CASES["dense"]
    state = model.state()
    train(state, np.random.default_rng(9), 0.5)
    loaded = load_model(model.save(tmp_path / "other", state))
    spool = str(chain.spool.folder)
    backend = start_backend(loaded, mirror=mirrored(chain, tmp_path, 1), spool=spool)
    with loaded.active():
        for number, anew in ((1, 1), (2, 0), (3, 0)):  # the layout is learnt when the mirror is loaded
            seq = chain.put(number)
            backend.prepare(seq)
            answer = backend.swap(seq)  # it waits until the update is staged
            assert (answer["outcome"], answer["seq"], loads_in(answer)) == ("made", seq, anew), answer
            assert answer["live"]
        assert not difference(memory(loaded.model), memory(load_model(chain.checkpoints[3]).model))
        answer = backend.swap(chain.commits[1].seq)  # no hop leads back, but the mirror has the version
        assert (answer["outcome"], loads_in(answer)) == ("made", 1)
        refused = backend.swap(chain.commits[3].seq)
        assert (refused["outcome"], refused["seq"]) == ("refused", chain.commits[1].seq)
        assert f"mirror holds commit {chain.commits[1].seq}" in refused["error"]
        backend.init_transfer_engine(type(backend._info)(spool=spool))  # other settings: layout and version stay
        assert backend.status()["seq"] == chain.commits[1].seq
        assert backend.learn(str(chain.spool.table_path))["seq"] == chain.commits[1].seq

        from deltawire.engines.vllm import loading

        backend.init_transfer_engine(type(backend._info)(spool=spool, mirror=mirrored(chain, tmp_path, 2)))
        before = memory(loaded.model)
        with monkeypatch.context() as patch:
            patch.setattr(loading, "load_tensors", lambda model, config, tensors: list(tensors))
            answer = backend.swap(chain.commits[2].seq, anew=True)
        assert (answer["outcome"], answer["quarantined"]) == ("quarantined", True)
        assert "do not have the digest" in answer["error"]
        assert not difference(memory(loaded.model), before)
        answer = backend.swap(chain.commits[2].seq)
        assert (answer["outcome"], answer["quarantined"], loads_in(answer)) == ("made", False, 1)
    assert not difference(memory(loaded.model), memory(load_model(chain.checkpoints[2]).model))
    backend.shutdown()


def test_a_late_check_does_not_see_weights_that_are_being_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = Chain(tmp_path, *CASES["dense"])
    loaded = load_model(chain.checkpoints[0])
    from deltawire.engines.vllm import loading
    from deltawire.engines.vllm.live.live_staging import LiveStaging
    from deltawire.engines.vllm.live.live_weights import LiveWeights

    backend = start_backend(loaded, mirror=mirrored(chain, tmp_path, 2), spool=str(chain.spool.folder), confirm="written")
    is_checking, may_check, checked = threading.Event(), threading.Event(), threading.Event()
    check = LiveWeights.check_direct

    def slowly(weights: LiveWeights) -> None:
        is_checking.set()
        may_check.wait()
        check(weights)
        checked.set()

    with loaded.active():
        backend.learn(str(chain.spool.table_path))
        backend.adopt(chain.ref(0).plain())
        monkeypatch.setattr(LiveWeights, "check_direct", slowly)
        assert backend.swap(chain.put(1))["outcome"] == "made"
        is_checking.wait()
        load_tensors = loading.load_tensors

        def load_when_checked(*arguments: Any) -> None:
            assert checked.is_set()
            load_tensors(*arguments)

        monkeypatch.setattr(loading, "load_tensors", load_when_checked)
        wait = LiveStaging.wait

        def wait_for_check(staging: LiveStaging) -> None:
            may_check.set()
            wait(staging)

        monkeypatch.setattr(LiveStaging, "wait", wait_for_check)
        answer = backend.swap(chain.commits[2].seq, anew=True)
        assert (answer["outcome"], answer["quarantined"]) == ("made", False), answer["error"]
    backend.shutdown()


@pytest.mark.parametrize("how", ["wrong", "unreadable"])
def test_weights_that_a_late_check_does_not_confirm_quarantine_the_worker(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = Chain(tmp_path, *CASES["dense"])
    loaded = load_model(chain.checkpoints[0])
    from deltawire.engines.vllm.live.live_weights import LiveWeights

    backend = start_backend(loaded, spool=str(chain.spool.folder), url=chain.url, confirm="written")
    may_check = threading.Event()
    check = LiveWeights.check_direct

    def check_later(weights: LiveWeights) -> None:
        may_check.wait()
        if how == "unreadable":
            raise RuntimeError("the device is lost")
        next(iter(weights._direct_tensors.by_name.values())).neg_()
        check(weights)

    with loaded.active():
        backend.learn(str(chain.spool.table_path))
        backend.adopt(chain.ref(0).plain())
        monkeypatch.setattr(LiveWeights, "check_direct", check_later)
        answer = backend.swap(chain.put(1))
        assert (answer["outcome"], answer["quarantined"], answer["unconfirmed"]) == ("made", False, True)
        may_check.set()
        assert backend._updates is not None
        backend._updates.wait()
        status = backend.status()
        assert (status["quarantined"], status["unconfirmed"], status["seq"]) == (True, False, None)
        monkeypatch.undo()
        assert backend.quarantine("of its digest")["error"] == "of its digest"
        answer = backend.swap(chain.put(2))
        assert (answer["outcome"], answer["quarantined"], answer["last"]["loaded_anew"]) == ("made", False, 1), answer["error"]
    backend.shutdown()


def test_failed_swaps_are_undone_or_quarantine_the_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from deltawire.engines.vllm.live.layout_update import LayoutUpdate

    chain = Chain(tmp_path, *CASES["dense"])
    loaded = load_model(chain.checkpoints[0])
    before = memory(loaded.model)
    backend = start_backend(loaded, spool=str(chain.spool.folder), mirror=mirrored(chain, tmp_path, 1))
    apply = LayoutUpdate.apply

    def apply_and_fail(update: LayoutUpdate, **options: Any) -> None:
        apply(update, **options)
        raise RuntimeError("injected")

    with loaded.active():
        backend.learn(str(chain.spool.table_path))
        backend.adopt(chain.ref(0).plain())
        seq = chain.put(1)
        with monkeypatch.context() as patch:
            patch.setattr(LayoutUpdate, "apply", apply_and_fail)
            answer = backend.swap(seq)
            assert (answer["outcome"], answer["seq"]) == ("refused", chain.commits[0].seq)
            assert "injected" in answer["error"]
            assert not difference(memory(loaded.model), before)
            patch.setattr(LayoutUpdate, "revert", lambda update: None)
            answer = backend.swap(seq)
            assert (answer["outcome"], answer["seq"], answer["quarantined"]) == ("quarantined", None, True)
        answer = backend.swap(seq)  # the next update loads everything
        assert (answer["outcome"], answer["seq"], answer["quarantined"], loads_in(answer)) == ("made", seq, False, 1), answer
        answer = backend.swap(chain.put(2))
        assert (answer["outcome"], loads_in(answer)) == ("made", 0)
    assert not difference(memory(loaded.model), memory(load_model(chain.checkpoints[2]).model))
    backend.shutdown()


def test_an_update_that_is_missing_or_damaged_in_the_spool_is_refused(tmp_path: Path) -> None:
    chain = Chain(tmp_path, *CASES["dense"], versions=2)
    loaded = load_model(chain.checkpoints[0])
    backend = start_backend(loaded, spool=str(chain.spool.folder))
    with loaded.active():
        backend.learn(str(chain.spool.table_path))
        backend.adopt(chain.ref(0).plain())
        missing = backend.swap(chain.commits[1].seq)
        assert (missing["outcome"], missing["seq"]) == ("refused", chain.commits[0].seq)
        assert "the spool has no update" in missing["error"]
        seq = chain.put(1)
        for path in (chain.spool.folder / "files").iterdir():
            path.chmod(0o600)
            path.write_bytes(path.read_bytes()[:-1] + b"x")
        damaged = backend.swap(seq)
        assert damaged["outcome"] == "refused"
        assert "is damaged" in damaged["error"]
        chain.put(1)  # fetches it again
        assert backend.swap(seq)["outcome"] == "made"
        same = backend.swap(seq, anew=True)  # the commit of another chain can have this number, too
        assert (same["outcome"], same["seq"]) == ("refused", seq)
        assert "no URL was given" in same["error"]
    backend.shutdown()


def test_a_spool_that_cannot_be_used_is_reported(tmp_path: Path) -> None:
    chain = Chain(tmp_path, *CASES["dense"], versions=2)
    loaded = load_model(chain.checkpoints[0])
    (tmp_path / "file").touch()
    backend = start_backend(loaded, spool=str(tmp_path / "file" / "spool"))
    seq = chain.put(1)
    with loaded.active():
        assert backend.learn(str(chain.spool.table_path))["live"]  # this model needs no memory in the spool
        assert backend.adopt(chain.ref(0).plain())["seq"] == chain.commits[0].seq
        assert backend.swap(seq)["outcome"] == "refused"
        chain.spool.folder.chmod(0o777)  # other users could have put an update of their own there
        backend.init_transfer_engine(type(backend._info)(spool=str(chain.spool.folder)))
        backend.prepare(seq)
        backend._updates._staging.wait()
        assert "only this user can write to" in backend.status()["staging_error"]
        assert (backend.swap(seq)["outcome"], backend.status()["seq"]) == ("refused", chain.commits[0].seq)
        chain.spool.folder.chmod(0o700)
        assert backend.swap(seq)["outcome"] == "made"
    backend.shutdown()


def test_a_gpu_worker_learns_its_layout_before_the_kv_cache_takes_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from deltawire.codec.gpu import device

    chain = Chain(tmp_path, *CASES["dense"], versions=2)
    loaded = load_model(chain.checkpoints[0])
    learnt: list[int] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from deltawire.engines.vllm import worker_model
    learn = worker_model.learn_layout

    def counted(model: Any, config: Any, table: Any, **options: Any) -> Any:
        learnt.append(len(table))
        return learn(model, config, table, **options)

    monkeypatch.setattr(worker_model, "learn_layout", counted)
    monkeypatch.setattr(device, "_PRIORITIES", dict(device._PRIORITIES))
    backend = start_backend(loaded, device="cuda", spool=str(chain.spool.folder))
    assert learnt == [chain.commits[0].tensors]
    assert device._PRIORITIES == {}  # decoding does not come before generation
    backend.take_draft(None)  # a worker without a draft model says so
    with loaded.active():
        assert backend.learn(str(chain.spool.table_path))["live"]
    assert len(learnt) == 1
    backend.shutdown()


def test_a_layout_that_cannot_be_updated_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = Chain(tmp_path, *CASES["dense"], versions=2)
    loaded = load_model(chain.checkpoints[0])
    backend = start_backend(loaded, spool=str(chain.spool.folder))
    monkeypatch.setenv("DELTAWIRE_LEARN", "0")
    with loaded.active():
        status = backend.learn(str(chain.spool.table_path))
        assert not status["live"]
        assert "DELTAWIRE_LEARN is 0" in status["why_not"]
        assert backend.adopt(chain.ref(0).plain())["seq"] is None
        answer = backend.swap(chain.put(1))
        assert answer["outcome"] == "refused"
        assert "no URL was given to load it from" in answer["error"]
        backend.init_transfer_engine(type(backend._info)(spool=str(tmp_path / "other"), url=chain.url))
        assert "loads everything: " in backend.prepare(chain.commits[0].seq)["staging_error"]
        answer = backend.swap(chain.commits[0].seq)
        assert (answer["outcome"], answer["live"], loads_in(answer)) == ("made", False, 1), answer
        answer = backend.swap(chain.commits[1].seq)
        assert (answer["outcome"], answer["seq"]) == ("refused", chain.commits[0].seq)
        assert "only a mirror has the version" in answer["error"]
        backend.init_transfer_engine(type(backend._info)(spool=str(chain.spool.folder), mirror=mirrored(chain, tmp_path, 1)))
        answer = backend.swap(chain.commits[1].seq)
        assert (answer["outcome"], answer["live"], loads_in(answer)) == ("made", False, 1), answer
        assert backend.learn(str(chain.spool.table_path))["seq"] == chain.commits[1].seq  # the weights are the same
        assert not difference(memory(loaded.model), memory(load_model(chain.checkpoints[1]).model))
        monkeypatch.delenv("DELTAWIRE_LEARN")
        assert "SpoolError" not in (backend.learn(str(tmp_path / "nothing.json"))["why_not"] or "SpoolError")
        assert backend.learn(str(chain.spool.table_path))["live"]
    backend.shutdown()


def test_a_chain_that_does_not_fit_the_model_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    model, recipe = CASES["int4"]
    right, int4, fp8 = (Chain(tmp_path / str(each), model, each, versions=1) for each in (None, recipe, "fp8-channel"))
    adapter = DeltaSpool(tmp_path / "adapter")
    matrix = TensorSpec(dtype_named("F32"), (8, 64))
    write_table(adapter.table_path, {f"base_model.model.model.layers.{n}.self_attn.q_proj.lora_A.weight": matrix for n in range(50)})
    loaded = load_model(right.checkpoints[0])
    before = memory(loaded.model)
    backend = start_backend(loaded, spool=str(tmp_path / "spool"), url=int4.url)
    with loaded.active():
        for spool in (int4.spool, fp8.spool, adapter):
            status = backend.learn(str(spool.table_path))
            assert not status["live"]
            assert "tensors do not fit" in status["misfit"]
            assert len(status["misfit"]) < 600
            assert status["loaded_types"] == "bfloat16"
        for info in ({"url": int4.url}, {"url": fp8.url}, {"mirror": mirrored(int4, tmp_path, 0)}):
            backend.init_transfer_engine(type(backend._info)(spool=str(tmp_path / "spool"), **info))
            answer = backend.swap(int4.commits[0].seq)
            assert (answer["outcome"], answer["quarantined"]) == ("refused", False), answer
            assert "does not fit the model" in answer["error"]
        assert not difference(memory(loaded.model), before)
        status = backend.learn(str(right.spool.table_path))
        assert (status["live"], status["misfit"]) == (True, None), status["why_not"]
        assert backend.adopt(right.ref(0).plain())["seq"] == right.commits[0].seq
    backend.shutdown()


class UnusableSpool:
    def __init__(self, *_: object, **__: object) -> None:
        raise OSError("no spool today")


def test_settings_that_turn_out_to_be_unusable_leave_those_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = Chain(tmp_path, *CASES["dense"])
    loaded = load_model(chain.checkpoints[0])
    backend = start_backend(loaded, spool=str(chain.spool.folder))
    from deltawire.engines.vllm import backend as backends

    info = backends.InitInfo(spool=str(chain.spool.folder), url=chain.url)
    with monkeypatch.context() as patch:
        patch.setattr(backends, "FetchingSpool", UnusableSpool)
        with pytest.raises(EngineRefused, match="no spool today"):
            backend.init_transfer_engine(info)
        patch.setattr(backends, "raises_for_all", lambda: False)  # as in all workers but the last one
        for wrong in (info, backend.parse_init_info({"unknown": 1}), backends.InitInfo(spool=5)):  # type: ignore[arg-type]
            backend.init_transfer_engine(wrong)
            assert backend.status()["error"]
            assert backend._info == backends.InitInfo(spool=str(chain.spool.folder))
        backend.update_weights({"seq": "x"})
        assert "seq must be" in backend.status()["error"]
        backend.update_weights({"nothing": 0})
    backend.init_transfer_engine(info)
    assert backend._info == info
    with loaded.active():
        assert backend.learn(str(chain.spool.table_path))["live"]
        assert backend.adopt(chain.ref(0).plain())["seq"] == chain.commits[0].seq
        assert backend.swap(chain.put(1))["outcome"] == "made"
    backend.shutdown()


def test_a_version_that_lacks_a_tensor_is_refused_and_the_next_whole_one_is_taken(tmp_path: Path) -> None:
    norm, lacks = "model.layers.0.input_layernorm.weight", [False, False, True, False, False]

    def without_norm(state: State) -> State:
        is_lacking = lacks.pop(0)
        return {name: tensor for name, tensor in state.items() if name != norm or not is_lacking}

    model, recipe = CASES["dense"]
    with pytest.warns(LayoutChanged, match="removed|added"):
        chain = Chain(tmp_path / "chain", model, recipe, versions=5, join=without_norm)
    loaded = load_model(chain.checkpoints[0])
    backend = start_backend(loaded, spool=str(tmp_path / "spool"), url=chain.url)
    first, second, third, fourth, fifth = (commit.seq for commit in chain.commits)
    with loaded.active():
        assert backend.learn(str(chain.spool.table_path))["live"]
        assert backend.adopt(chain.ref(0).plain())["seq"] == first
        for anew in (False, True):
            assert backend.swap(second, anew)["outcome"] == "made"
            refused = backend.swap(third, anew)
            assert (refused["outcome"], refused["seq"], refused["quarantined"]) == ("refused", second, False), refused
            assert "lacks 1 of the tensors" in refused["misfit"]
            assert norm in refused["error"]
            assert not difference(memory(loaded.model), memory(load_model(chain.checkpoints[1]).model))
        for number, seq in ((3, fourth), (4, fifth)):
            answer = backend.swap(seq)
            assert (answer["outcome"], answer["misfit"], answer["live"]) == ("made", None, True), answer
            assert not difference(memory(loaded.model), memory(load_model(chain.checkpoints[number]).model))
    backend.shutdown()


def test_a_version_with_two_values_for_a_tied_tensor_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    embedding, kinds = "model.embed_tokens.weight", ["both", "tied", "other", "tied", "both"]

    def with_output_layer(state: State) -> State:
        kind = kinds.pop(0)
        if kind == "tied":
            return dict(state)
        return {**state, "lm_head.weight": state[embedding] if kind == "both" else state[embedding][::-1].copy()}

    with pytest.warns(LayoutChanged, match="removed|added"):
        chain = Chain(tmp_path / "chain", TinyModel("tied", tied=True, layers=1), None, versions=5, join=with_output_layer)
    loaded = load_model(chain.checkpoints[0])
    backend = start_backend(loaded, spool=str(tmp_path / "spool"), url=chain.url)
    first, before, other, tied, both = (commit.seq for commit in chain.commits)
    with loaded.active():
        for number, seq in ((0, first), (1, before)):
            assert backend.swap(seq)["outcome"] == "made"
            assert not difference(memory(loaded.model), memory(load_model(chain.checkpoints[number]).model))
        held = memory(loaded.model)
        for info in ({"url": chain.url}, {"mirror": mirrored(chain, tmp_path, 2)}):
            backend.init_transfer_engine(type(backend._info)(spool=str(tmp_path / "spool"), **info))
            refused = backend.swap(other, True)
            assert (refused["outcome"], refused["seq"], refused["quarantined"]) == ("refused", before, False), refused
            assert "are tied in the model, but differ in the chain" in refused["error"]
            assert not difference(memory(loaded.model), held)
        backend.init_transfer_engine(type(backend._info)(spool=str(tmp_path / "spool"), url=chain.url))
        for number, seq in ((3, tied), (4, both)):
            assert backend.swap(seq)["outcome"] == "made"
            assert not difference(memory(loaded.model), memory(load_model(chain.checkpoints[number]).model))
    backend.shutdown()


def test_a_server_without_a_mirror_loads_checkpoints_from_the_store_and_fetches_deltas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, recipe = CASES["int4"]
    chain = Chain(tmp_path / "chain", model, recipe, versions=5)
    state = model.state()
    train(state, np.random.default_rng(9), 0.5)
    (tmp_path / "other").mkdir()
    _, (other,) = publish(tmp_path / "other", model, [state], recipe)
    loaded = load_model(other)
    before = memory(loaded.model)
    backend = start_backend(loaded, spool=str(tmp_path / "spool"), url=chain.url)
    first, second, third, _, fifth = (commit.seq for commit in chain.commits)
    with loaded.active():
        refused = backend.swap(99)
        assert (refused["outcome"], refused["seq"]) == ("refused", None)
        assert "the chain has no commit 99" in refused["error"]
        assert not difference(memory(loaded.model), before)
        for seq, anew in ((second, 1), (third, 0), (fifth, 0)):  # a checkpoint and a delta; a delta; two deltas
            backend.prepare(seq)
            answer = backend.swap(seq)
            assert (answer["outcome"], answer["seq"], loads_in(answer)) == ("made", seq, anew), answer["error"]
            assert not difference(memory(loaded.model), memory(load_model(chain.checkpoints[seq - first]).model))

        from deltawire.engines.vllm.live import cold_start

        def cut_short(*arguments: Any, **options: Any) -> Any:
            tensors = stream(*arguments, **options)
            yield next(tensors)
            tensors.close()
            raise ConnectionError("the store is gone")

        stream = cold_start.stream_anchor
        monkeypatch.setattr(cold_start, "stream_anchor", cut_short)
        answer = backend.swap(first, anew=True)
        assert (answer["outcome"], answer["seq"], answer["quarantined"]) == ("quarantined", None, True)
        assert "the store is gone" in answer["error"]
        monkeypatch.setattr(cold_start, "stream_anchor", stream)
        answer = backend.swap(first, anew=True)
        assert (answer["outcome"], answer["quarantined"], loads_in(answer)) == ("made", False, 1), answer["error"]
        assert backend.swap(second)["outcome"] == "made"
        assert not difference(memory(loaded.model), memory(load_model(chain.checkpoints[1]).model))
    assert not list((tmp_path / "spool" / "shards").iterdir())
    backend.shutdown()
