"""The draft model of speculative decoding follows the chain: one swap updates it together with the model. Both equal a fresh load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from live_server import LiveServer
from loaded_models import MTP, LoadedModel, import_vllm, load_draft, load_model, start_backend
from model_memory import addresses, difference, memory
from test_live_backend import Chain, loads_in
from tiny_checkpoints import State, TinyMtp

from deltawire.engines.vllm.driver.sidecar import Sidecar
from deltawire.errors import EngineRefused
from deltawire.events import Event
from deltawire.format.bundle_names import MAIN
from deltawire.trainers import join_bundles

pytestmark = pytest.mark.slow

MODEL = TinyMtp("mtp", layers=1)


def load(checkpoint: Path, draft_from: Path | None = None) -> tuple[LoadedModel, Any]:
    """Load a model, and its draft from the same checkpoint or from one of its own."""
    config = MTP if draft_from is None else {**MTP, "model": str(draft_from)}
    loaded = load_model(checkpoint, speculative_config=config)
    return loaded, load_draft(loaded)


def both(loaded: LoadedModel, draft: Any) -> dict[str, str]:
    return memory([loaded.model, draft])


def follow(chain: Chain, loaded: LoadedModel, draft: Any, **info: Any) -> Any:
    """Return a backend that has adopted the first version."""
    backend = start_backend(loaded, spool=str(chain.spool.folder), **info)
    backend.take_draft(draft)
    with loaded.active():
        status = backend.learn(str(chain.spool.table_path))
        assert status["live"], status["why_not"]
        assert backend.adopt(chain.ref(0).plain())["seq"] == chain.commits[0].seq
    return backend


def test_a_draft_in_the_checkpoint_of_the_model_is_updated_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from deltawire.engines.vllm.live.layout_update import LayoutUpdate

    chain = Chain(tmp_path, MODEL, None, versions=4)
    loaded, draft = load(chain.checkpoints[0])
    assert draft.model.embed_tokens is loaded.model.model.embed_tokens
    before, places = both(loaded, draft), addresses([loaded.model, draft])
    backend = follow(chain, loaded, draft)
    assert difference(both(loaded, draft), before) == [], "learning has changed a model"
    status = backend.status()
    assert status["draft"] == {"model": "ErnieMTP", "follows": True, "why_not": None}
    assert (status["tensors"], status["kept_bytes"]) == ({"direct": len(MODEL.state())}, 0)  # also the shared ones: they are written once
    apply, fails = LayoutUpdate.apply, [True]

    def apply_or_fail(update: LayoutUpdate, **options: Any) -> None:
        apply(update, **options)
        if fails and fails.pop():
            raise RuntimeError("injected")

    monkeypatch.setattr(LayoutUpdate, "apply", apply_or_fail)
    with loaded.active():
        seq = chain.put(1)
        assert backend.swap(seq)["outcome"] == "refused"
        assert difference(both(loaded, draft), before) == [], "a failed swap was not undone in both models"
        for number in range(1, len(chain.commits)):
            answer = backend.swap(chain.put(number))
            assert (answer["outcome"], loads_in(answer)) == ("made", 0), answer["error"]
    assert difference(both(loaded, draft), both(*load(chain.checkpoints[-1]))) == []
    assert addresses([loaded.model, draft]) == places

    newest = chain.commits[-1].seq  # vLLM's routes for the draft alone: it has the version already
    update = type(backend).update_info_cls
    for seq in (newest, newest - 1):
        backend.set_weight_update_target(draft, None)
        if seq == newest:
            backend.receive_weights(update(seq))
        else:
            with pytest.raises(EngineRefused, match="updated together with the model, which has commit"):
                backend.receive_weights(update(seq))
        backend.reset_weight_update_target()
    assert backend.status()["seq"] == newest
    backend.shutdown()


def test_a_full_load_from_the_store_loads_the_draft_too(tmp_path: Path) -> None:
    """The draft does not share its embedding here, so one tensor of the chain is held twice. The first version is of another run."""
    chain = Chain(tmp_path, MODEL, None)
    first = MODEL.save(tmp_path / "other", MODEL.state(seed=9))
    loaded, draft = load(first)
    apart = load_model(first, speculative_config=MTP)
    draft.model.embed_tokens = apart.model.model.embed_tokens
    places = [tensor.data_ptr() for model in (loaded.model, draft) for tensor in model.parameters()]
    backend = start_backend(loaded, spool=str(chain.spool.folder), url=chain.url)
    backend.take_draft(draft)
    seqs = [commit.seq for commit in chain.commits]
    with loaded.active():
        for seq, anew in ((seqs[0], 1), (seqs[1], 0)):
            answer = backend.swap(seq)
            assert (answer["outcome"], loads_in(answer)) == ("made", anew), answer["error"]
        assert backend.status()["tensors"] == {"direct": len(MODEL.state()) - 1, "mapped": 1}
        backend.forget()  # as a sleep that discards the weights does
        with_garbage = dict(draft.named_parameters())["model.layers.1.mtp_linear_proj.weight"]
        with_garbage.data.zero_()
        answer = backend.swap(seqs[2])
        assert (answer["outcome"], loads_in(answer)) == ("made", 1), answer["error"]
    fresh, fresh_draft = load(chain.checkpoints[2])
    assert difference(memory(loaded.model), memory(fresh.model)) == []
    held, expected = dict(draft.named_parameters()), dict(fresh_draft.named_parameters())
    assert held.keys() == expected.keys()
    assert not [name for name, tensor in held.items() if not bool((tensor == expected[name]).all())]
    assert draft.model.embed_tokens is not loaded.model.model.embed_tokens
    assert [tensor.data_ptr() for model in (loaded.model, draft) for tensor in model.parameters()] == places
    backend.shutdown()


def test_a_draft_with_a_checkpoint_of_its_own_stays_as_it_is(tmp_path: Path) -> None:
    chain = Chain(tmp_path, MODEL, None)
    own = MODEL.save(tmp_path / "draft", MODEL.state(seed=5))
    loaded, draft = load(chain.checkpoints[0], own)
    before = memory(draft.model.layers)
    backend = follow(chain, loaded, draft)
    status = backend.status()
    assert status["draft"]["follows"] is False
    assert str(own) in status["draft"]["why_not"]
    assert status["tensors"]["absent"] == sum("mtp" in name for name in MODEL.state())
    with loaded.active():
        for number in (1, 2):
            answer = backend.swap(chain.put(number))
            assert answer["outcome"] == "made", answer["error"]
    assert difference(memory(draft.model.layers), before) == []
    fresh, _ = load(chain.checkpoints[2], own)
    assert difference(memory(loaded.model), memory(fresh.model)) == []
    assert draft.model.embed_tokens is loaded.model.model.embed_tokens  # shared, so it is that of the new version
    backend.set_weight_update_target(draft, None)
    with pytest.raises(EngineRefused, match="checkpoint of its own"):
        backend.receive_weights(type(backend).update_info_cls(chain.commits[2].seq))
    backend.shutdown()


def bundled(state: State) -> State:
    """Return the weights of a version whose draft has a checkpoint of its own: its tensors are a bundle."""
    own = {name: tensor for name, tensor in state.items() if "mtp" in name}
    return join_bundles({name: tensor for name, tensor in state.items() if name not in own}, draft=own)  # type: ignore[return-value]


def save_apart(folder: Path, state: State) -> tuple[Path, Path]:
    """Write the checkpoints of the model and of its draft, which has the embedding too."""
    model = MODEL.save(folder / "model", {name: tensor for name, tensor in state.items() if "mtp" not in name})
    shared = ("model.embed_tokens.weight", "lm_head.weight")
    return model, MODEL.save(folder / "draft", {name: tensor for name, tensor in state.items() if "mtp" in name or name in shared})


def test_a_draft_with_a_checkpoint_of_its_own_follows_the_bundle_draft(tmp_path: Path) -> None:
    chain = Chain(tmp_path, MODEL, None, versions=4, join=bundled)
    states = chain.states
    loaded, draft = load(*save_apart(tmp_path / "first", states[0]))
    backend = follow(chain, loaded, draft, url=chain.url)
    status = backend.status()
    assert status["draft"]["follows"]
    assert (status["tensors"], status["kept_bytes"]) == ({"direct": len(states[0])}, 0)
    with loaded.active():
        for number, is_new in ((1, False), (2, True), (3, False)):
            if is_new:
                backend.forget()
            answer = backend.swap(chain.commits[number].seq)
            assert (answer["outcome"], loads_in(answer)) == ("made", int(is_new)), answer["error"]
    assert difference(both(loaded, draft), both(*load(*save_apart(tmp_path / "last", states[3])))) == []
    backend.shutdown()


def test_bundles_that_a_server_does_not_use_do_not_hinder_its_updates(tmp_path: Path) -> None:
    """A LoRA adapter in the chain of its model: the first version is loaded in full, because the server's checkpoint does not have it."""
    adapter = {"q_proj.lora_A.weight": np.ones((8, 4), np.float32)}
    chain = Chain(tmp_path, MODEL, None, join=lambda state: join_bundles(state, math=adapter))  # type: ignore[return-value, arg-type]
    states = chain.states
    loaded, draft = load(MODEL.save(tmp_path / "model", states[0]))
    backend = start_backend(loaded, spool=str(chain.spool.folder), url=chain.url)
    backend.take_draft(draft)
    with loaded.active():
        assert backend.learn(str(chain.spool.table_path))["live"]
        assert backend.adopt(chain.ref(0).plain())["seq"] is None
        for number, is_new in ((0, 1), (1, 0), (2, 0)):
            answer = backend.swap(chain.commits[number].seq)
            assert (answer["outcome"], loads_in(answer)) == ("made", is_new), answer["error"]
    assert backend.status()["tensors"] == {"direct": len(states[0]), "absent": 1}
    fresh = load(MODEL.save(tmp_path / "last", states[2]))
    assert difference(both(loaded, draft), both(*fresh)) == []
    backend.shutdown()


def test_a_server_with_two_workers_updates_its_draft(
    start_run: Callable[..., Any], serve: Callable[..., LiveServer], tmp_path: Path
) -> None:
    run = start_run(MODEL)
    run.publish(changed=False)
    arguments = ["--speculative-config", json.dumps(MTP)]
    server = serve(run.checkpoint, ranks=2, arguments=arguments).wait()
    events: list[Event] = []
    sidecar = Sidecar(server.url, run.store, spool=tmp_path / "spool", on_event=events.append)
    sidecar.step()
    for _ in range(2):
        run.publish()
        sidecar.step()
    sidecar.close()
    assert [event.fields["live"] for event in events if event.name == "swapped"] == [1, 1]
    assert [worker["draft"]["follows"] for worker in server.routes.status()] == [True, True]
    held, tokens = server.routes.call_workers("deltawire_test_memory"), server.generate()
    server.kill()
    fresh = serve(run.saved(), ranks=2, arguments=arguments).wait()
    for one, other in zip(held, fresh.routes.call_workers("deltawire_test_memory"), strict=True):
        assert any(path.startswith("draft.model.layers") for path in one)
        assert difference(one, other) == []
    assert tokens == fresh.generate()


def test_the_same_checkpoint_by_another_path_is_the_same(tmp_path: Path) -> None:
    import_vllm()
    import torch

    from deltawire.engines.vllm.draft import Modules, draft_of

    (tmp_path / "model").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "model")
    shutil.copytree(tmp_path / "model", tmp_path / "copy")

    def follows(target: str, own: str, weights: str = "", revision: str | None = None) -> bool:
        config = SimpleNamespace(model=own, revision=revision)
        model = SimpleNamespace(model=target, model_weights=weights, revision=None)
        found = draft_of(
            torch.nn.Linear(1, 1), SimpleNamespace(model_config=model, speculative_config=SimpleNamespace(draft_model_config=config))
        )
        assert found is not None
        return found.bundle({}) == MAIN

    assert follows(str(tmp_path / "model"), str(tmp_path / "link"))
    assert follows("/cache/of/streamer", "s3://bucket/model", weights="s3://bucket/model")
    assert follows("org/name", "org/name")
    assert not follows("org/name", "org/name", revision="draft")
    assert not follows("org/name", "org/name-eagle")
    assert not follows(str(tmp_path / "model"), str(tmp_path / "copy"))
    assert draft_of(None, SimpleNamespace(speculative_config=None)) is None
    target, draft = torch.nn.ModuleDict({"a": torch.nn.Linear(1, 1)}), torch.nn.ModuleDict({"a": torch.nn.Linear(1, 1)})
    modules = Modules(target, draft)
    assert (modules.get_submodule("a"), modules.get_submodule("draft.a")) == (target["a"], draft["a"])


def test_workers_tell_the_backend_their_draft_before_anything_is_learnt() -> None:
    import_vllm()
    from deltawire.engines.vllm.draft import tell_drafts

    calls: list[Any] = []

    class Worker:
        def __init__(self, device: str) -> None:
            self.device = SimpleNamespace(type=device)
            self.weight_transfer_engine = SimpleNamespace(take_draft=lambda draft, is_early: calls.append((draft, is_early)))
            self.model_runner = SimpleNamespace(get_draft_model=lambda: "the draft")

        def init_weight_transfer_engine(self, init_info: Any) -> None:
            calls.append(init_info)

        def determine_available_memory(self) -> int:
            calls.append("measured")
            return 7

    tell_drafts(Worker)
    assert Worker("cuda").determine_available_memory() == 7
    Worker("cpu").init_weight_transfer_engine("info")
    other = Worker("cuda")
    other.weight_transfer_engine, other.model_runner = SimpleNamespace(), SimpleNamespace()  # another backend, another runner
    other.init_weight_transfer_engine("other")
    assert calls == [("the draft", True), "measured", ("the draft", False), "info", "other"]
    from vllm.v1.worker.gpu_worker import Worker as VllmWorker

    assert hasattr(VllmWorker, "init_weight_transfer_engine")
    assert hasattr(VllmWorker, "determine_available_memory")
