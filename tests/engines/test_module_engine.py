"""Test what only module engines do: they handle names, tied weights, types, and weights that other code changes."""

from __future__ import annotations

import copy
import inspect
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tiny_models import bits, clone, logits, qwen, step, torch

from deltawire.chain.reader_options import ReaderOptions
from deltawire.delta.prepared import PreparedUpdate
from deltawire.engines import HotSwap, KvCache, ModuleEngine
from deltawire.engines.weights.host_copy import HostCopyUpdate, HostCopyWeights
from deltawire.errors import EngineQuarantined, EngineRefused, EngineUnavailable, SwapFailed
from deltawire.events import Event
from deltawire.publish import Publisher
from deltawire.publish.writer_options import WriterOptions
from deltawire.store.memory import MemoryStore
from deltawire.trainers import WeightSource, join_bundles

Follow = Callable[..., HotSwap]


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def publisher(store: MemoryStore) -> Iterator[Publisher]:
    with Publisher(store, options=WriterOptions(segment_bytes=1024)) as publisher:  # many segments: tied weights lie in different ones
        yield publisher


@pytest.fixture(params=["in place", "device"])
def follow(request: pytest.FixtureRequest, store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Follow]:
    if request.param == "device":
        monkeypatch.setattr("deltawire.engines.module.InPlaceWeights", HostCopyWeights)
    opened: list[HotSwap] = []

    def make(module: Any, *, engine: dict[str, Any] | None = None, **options: Any) -> HotSwap:
        opened.append(HotSwap(store, ModuleEngine(module, **(engine or {})), options=ReaderOptions(pin=False), **options))
        return opened[-1]

    yield make
    for swap in opened:
        swap.close()


def test_tied_weights_in_different_segments_stay_tied_and_can_be_reverted(publisher: Publisher, follow: Follow) -> None:
    trainer, served = qwen(0), qwen(1)
    swap = follow(served)
    states = []
    for number in range(4):
        publisher.publish(trainer.state_dict(), step=number)
        states.append(bits(trainer.state_dict()))
        swap.sync()
        assert bits(served.state_dict()) == states[-1]
        step(trainer, number)
    assert swap.version is not None
    swap.sync(seq=swap.version.seq - 2)
    assert bits(served.state_dict()) == states[1]
    assert served.lm_head.weight is served.model.embed_tokens.weight


def test_every_update_is_applied_once(publisher: Publisher, follow: Follow, monkeypatch: pytest.MonkeyPatch) -> None:
    applied: list[object] = []
    for kind in (PreparedUpdate, HostCopyUpdate):

        def counted(update: Any, apply: Callable[[Any], None] = kind.apply) -> None:
            applied.append(update)
            apply(update)

        monkeypatch.setattr(kind, "apply", counted)
    trainer, served = qwen(0), qwen(1)
    swap = follow(served)
    for number in range(4):
        publisher.publish(trainer.state_dict(), step=number)
        swap.sync()
        step(trainer, number)
    assert len(applied) == 3  # the first version is a full checkpoint
    assert len(set(map(id, applied))) == 3


def test_weights_tied_here_but_not_in_the_chain_are_refused(publisher: Publisher, follow: Follow) -> None:
    trainer, served = qwen(0, tied=False), qwen(1)
    before = bits(served.state_dict())
    publisher.publish(trainer.state_dict())
    with pytest.raises(EngineRefused, match="tied"):
        follow(served).sync()
    assert bits(served.state_dict()) == before


def test_tied_weights_that_later_differ_in_the_chain_are_not_written(publisher: Publisher, follow: Follow) -> None:
    trainer, served = qwen(0), qwen(1)
    state = clone(trainer.state_dict())
    publisher.publish(state)
    swap = follow(served)
    swap.sync()
    before = bits(served.state_dict())
    state["lm_head.weight"] = state["lm_head.weight"] + 1
    publisher.publish(state)
    with pytest.raises((EngineRefused, SwapFailed)):
        swap.sync()
    assert bits(served.state_dict()) == before


def test_a_chain_without_the_second_name_of_tied_weights_is_followed(publisher: Publisher, follow: Follow) -> None:
    trainer, served = qwen(0), qwen(1)
    source = WeightSource(trainer)
    assert "lm_head.weight" not in source.snapshot()
    swap = follow(served)
    for number in range(3):
        source.publish(publisher, step=number)
        swap.sync()
        assert bits(served.state_dict()) == bits(trainer.state_dict())
        step(trainer, number)


def test_a_chain_with_only_the_second_name_of_tied_weights_is_followed(publisher: Publisher, follow: Follow) -> None:
    trainer, served = qwen(0), qwen(1)
    swap = follow(served)
    for number in range(3):
        publisher.publish({name: tensor for name, tensor in trainer.state_dict().items() if name != "model.embed_tokens.weight"})
        swap.sync()
        assert bits(served.state_dict()) == bits(trainer.state_dict())
        step(trainer, number)


@pytest.mark.parametrize("tied", [True, False])
def test_a_module_that_has_the_newest_weights_already_fetches_nothing(publisher: Publisher, follow: Follow, tied: bool) -> None:
    trainer = qwen(0)
    source = WeightSource(trainer, tied=tied)
    source.publish(publisher)
    events: list[Event] = []
    swap = follow(qwen(0), on_event=events.append)
    version = swap.sync()
    assert [event.fields["bytes"] for event in events if event.name == "synced"] == [0]
    assert not [event for event in events if event.name == "swapped"]
    with swap.generation() as made_by:
        pass
    assert made_by.versions == (version,)
    step(trainer, 1)
    source.publish(publisher)
    swap.sync()


def test_a_module_that_says_which_version_it_was_loaded_from_fetches_only_deltas(publisher: Publisher, follow: Follow) -> None:
    trainer, served = qwen(0), qwen(0)
    first: Any = publisher.publish(trainer.state_dict())
    step(trainer, 1)
    second: Any = publisher.publish(trainer.state_dict())
    events: list[Event] = []
    follow(served, engine={"loaded_seq": first.seq}, on_event=events.append).sync()
    assert [event.fields["bytes"] for event in events if event.name == "synced"] == [second.bytes]
    assert bits(served.state_dict()) == bits(trainer.state_dict())


def test_a_module_that_is_wrong_about_its_version_gets_a_whole_checkpoint(publisher: Publisher, follow: Follow) -> None:
    trainer, served = qwen(0), qwen(5)
    first: Any = publisher.publish(trainer.state_dict())
    step(trainer, 1)
    publisher.publish(trainer.state_dict())
    follow(served, engine={"loaded_seq": first.seq}).sync()
    assert bits(served.state_dict()) == bits(trainer.state_dict())


@pytest.mark.parametrize(
    ("served", "reason"),
    [
        (lambda: qwen(1, dtype=torch.float32), "is float32 in the module, bfloat16 in the chain. Load the model with dtype='bfloat16'"),
        (lambda: qwen(1, attention_bias=True), "which the chain does not have"),
        (lambda: torch.nn.Linear(3, 3), "which the chain does not have"),
    ],
)
def test_a_module_of_other_names_types_or_shapes_is_refused_untouched(
    publisher: Publisher, follow: Follow, served: Callable[[], Any], reason: str
) -> None:
    publisher.publish(qwen(0).state_dict())
    module = served()
    before = bits(module.state_dict())
    swap = follow(module)
    with pytest.raises(EngineRefused, match=reason):
        swap.sync()
    assert bits(module.state_dict()) == before
    assert swap.version is None
    assert not swap.is_quarantined


def test_names_are_mapped_and_tensors_mapped_to_none_are_left_alone(publisher: Publisher, follow: Follow) -> None:
    trainer, served = torch.nn.Linear(4, 4), torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(2, 2))
    own = bits(served[1].state_dict())
    swap = follow(served, engine={"names": lambda name: name.replace("0.", "layer.") if name.startswith("0.") else None})
    for number in range(3):
        publisher.publish({f"layer.{name}": tensor for name, tensor in trainer.state_dict().items()})
        swap.sync()
        assert bits(served[0].state_dict()) == bits(trainer.state_dict())
        step(trainer, number)
    assert bits(served[1].state_dict()) == own


def test_two_tensors_of_one_wire_name_are_an_error() -> None:
    with pytest.raises(ValueError, match="wire name"):
        ModuleEngine(torch.nn.Linear(2, 2), names={"bias": "weight"}).weights()


def test_a_reader_takes_one_bundle_of_several(publisher: Publisher, follow: Follow) -> None:
    policy, draft = qwen(0), torch.nn.Linear(8, 8)
    followers = [qwen(1), torch.nn.Linear(8, 8)]
    swaps = [follow(followers[0], engine={"keep_others": True}), follow(followers[1], engine={"bundle": "draft", "keep_others": True})]
    for number in range(3):
        publisher.publish(join_bundles(policy.state_dict(), draft=draft.state_dict()))
        assert len({swap.sync().seq for swap in swaps}) == 1
        assert bits(followers[0].state_dict()) == bits(policy.state_dict())
        assert bits(followers[1].state_dict()) == bits(draft.state_dict())
        step(policy, number)
        step(draft, number + 10)
    with pytest.raises(EngineRefused, match="draft:"):
        follow(qwen(1)).sync()


def test_weights_that_other_code_changed_are_repaired(store: MemoryStore, publisher: Publisher) -> None:
    """A change in a tensor that the next delta updates is noticed before anything is written."""
    trainer, served = qwen(0), qwen(1)
    with HotSwap(store, ModuleEngine(served), options=ReaderOptions(pin=False)) as swap:
        publisher.publish(trainer.state_dict())
        swap.sync()
        with torch.no_grad():
            served.model.embed_tokens.weight[3] += 1
        step(trainer, 1)
        publisher.publish(trainer.state_dict())
        swap.sync()
        assert bits(served.state_dict()) == bits(trainer.state_dict())


def test_changed_weights_outside_of_deltas_are_never_served_with_new_ones(publisher: Publisher, follow: Follow) -> None:
    trainer, served = qwen(0), qwen(1)
    swap = follow(served)
    publisher.publish(trainer.state_dict())
    swap.sync()
    with torch.no_grad():
        served.model.norm.weight[3] += 1
        trainer.model.embed_tokens.weight[5] += 1
    publisher.publish(trainer.state_dict())
    with pytest.raises(EngineQuarantined):
        swap.sync()
    swap.sync()
    assert bits(served.state_dict()) == bits(trainer.state_dict())


def test_parameters_that_are_replaced_are_followed(publisher: Publisher, follow: Follow) -> None:
    trainer, served = qwen(0), qwen(1)
    swap = follow(served)
    for number in range(4):
        publisher.publish(trainer.state_dict())
        swap.sync()
        assert bits(served.state_dict()) == bits(trainer.state_dict())
        assert served.lm_head.weight.data_ptr() == served.model.embed_tokens.weight.data_ptr()
        step(trainer, number)
        served.model.norm.weight = torch.nn.Parameter(served.model.norm.weight.detach().clone())


def test_going_back_changes_parameters_that_were_replaced(publisher: Publisher, follow: Follow) -> None:
    """Kept update steps write to the parameters that they were made for, so they must not be used for others."""
    trainer, served = qwen(0), qwen(1)
    swap = follow(served, engine={"undo_bytes": 1 << 30}, confirm_every=1000)  # only the first swap reads all weights
    states, seqs = [], []
    for _ in range(3):
        publisher.publish(trainer.state_dict())
        seqs.append(swap.sync().seq)
        states.append(bits(trainer.state_dict()))
        with torch.no_grad():
            trainer.model.norm.weight += 1
    served.model.norm.weight = torch.nn.Parameter(served.model.norm.weight.detach().clone())
    swap.sync(seq=seqs[1])
    assert bits(served.state_dict()) == states[1]


def test_a_swap_waits_for_forward_passes_and_they_for_it(publisher: Publisher, follow: Follow) -> None:
    served = qwen(1)
    publisher.publish(qwen(0).state_dict())
    swap = follow(served, engine={"pause_timeout": 0.05})
    engine = swap.engine
    assert isinstance(engine, ModuleEngine)
    inside, leave = threading.Event(), threading.Event()

    def compute() -> None:
        with engine.forward_pass():
            inside.set()
            leave.wait(300)

    thread = threading.Thread(target=compute)
    thread.start()
    inside.wait(300)
    before = bits(served.state_dict())
    with pytest.raises(EngineUnavailable, match="1 forward passes"):
        swap.sync()
    assert bits(served.state_dict()) == before
    logits(served)  # forward passes are allowed again
    leave.set()
    thread.join(300)
    swap.sync()


def test_a_thread_that_computes_cannot_swap(publisher: Publisher, follow: Follow) -> None:
    publisher.publish(qwen(0).state_dict())
    swap = follow(qwen(1), kv_cache=KvCache.DROP)
    with swap.generation(), pytest.raises(EngineUnavailable, match="in the middle"):
        swap.sync()
    swap.sync()


@pytest.mark.parametrize("kv_cache", list(KvCache))
def test_caches_are_kept_across_swaps_or_not_as_asked(publisher: Publisher, follow: Follow, kv_cache: KvCache) -> None:
    """The test swaps in the middle of a real `generate`. With KEEP the swap happens there, with DROP after the generation."""
    trainer, served = qwen(0), qwen(1)
    publisher.publish(trainer.state_dict())
    swap = follow(served, kv_cache=kv_cache)
    old = swap.sync()
    step(trainer, 1)
    new: Any = publisher.publish(trainer.state_dict())
    threads: list[threading.Thread] = []

    def sync_meanwhile(ids: Any, scores: Any) -> Any:
        if ids.shape[1] == 8:
            threads.append(threading.Thread(target=swap.sync))
            threads[0].start()
            if kv_cache is not KvCache.DROP:
                threads[0].join(300)
        return scores

    prompt = torch.arange(4)[None]
    with swap.generation() as made_by:
        tokens = served.generate(prompt, max_new_tokens=12, do_sample=False, logits_processor=[sync_meanwhile], eos_token_id=-1)
    threads[0].join(300)
    assert tokens.shape == (1, 16)
    seqs = [version.seq for version in made_by.versions if version is not None]
    assert seqs == ([old.seq, new.seq] if kv_cache is not KvCache.DROP else [old.seq])
    assert swap.version is not None
    assert swap.version.seq == new.seq


def test_it_follows_on_a_separate_thread(publisher: Publisher, follow: Follow) -> None:
    trainer, served = qwen(0), qwen(1)
    publisher.publish(trainer.state_dict())
    swap = follow(served, confirm_every=3)
    swap.start(poll=0.01)
    for number in range(4):
        step(trainer, number)
        newest: Any = publisher.publish(trainer.state_dict())
        assert swap.wait_for(seq=newest.seq, timeout=300).seq >= newest.seq
        logits(served)
    swap.close()
    with pytest.raises(ValueError, match="no longer updated"):
        swap.wait_for(seq=newest.seq + 1)
    assert bits(served.state_dict()) == bits(trainer.state_dict())
    assert swap.last_swap is not None
    assert "forward" not in vars(served)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_forward_pass_that_is_interrupted_has_ended(error: type[BaseException], publisher: Publisher, follow: Follow) -> None:
    trainer, served = qwen(0), qwen(1)
    swap = follow(served, engine={"pause_timeout": 0})
    layers = served.model.layers  # type: ignore[attr-defined]

    def interrupt(*_: object) -> None:
        raise error

    hook = layers[0].register_forward_pre_hook(interrupt)
    with pytest.raises(error):
        logits(served)
    hook.remove()
    newest: Any = publisher.publish(trainer.state_dict())
    swap.sync()
    assert swap.version is not None
    assert swap.version.seq == newest.seq
    assert logits(served) == logits(trainer)


@pytest.mark.parametrize("has_version", [False, True])
def test_a_tensor_whose_elements_share_memory_is_refused_and_nothing_is_changed(
    has_version: bool, publisher: Publisher, follow: Follow
) -> None:
    class Expanded(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.other = torch.nn.Parameter(torch.zeros(4, 6).t())  # no elements of it share memory
            self.weight = torch.nn.Parameter(torch.ones(1, 4).expand(3, 4))

    served = Expanded()
    before = bits(served.state_dict())
    ones = {name: tensor.detach().clone() for name, tensor in served.state_dict().items()}
    publisher.publish(ones if has_version else {**ones, "weight": torch.arange(12.0).reshape(3, 4)})
    swap = follow(served)
    with pytest.raises(EngineRefused, match=r"elements of 'weight' share memory.*clone"):
        swap.sync()
    assert not swap.is_quarantined
    assert bits(served.state_dict()) == before
    served.weight = torch.nn.Parameter(served.weight.detach().clone())
    swap.sync()
    assert bits(served.state_dict()) == bits({**ones, "weight": served.weight.detach()})


def test_a_module_has_its_own_forward_again_in_copies_and_after_the_engine() -> None:
    module = torch.nn.Linear(2, 2)
    inputs = torch.ones(1, 2)
    signature = inspect.signature(module.forward)
    first, second = ModuleEngine(module), ModuleEngine(module)
    assert inspect.signature(module.forward) == signature
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        with torch.no_grad():
            copied.weight.zero_()
        assert bits({"y": copied(inputs)}) == bits({"y": module.bias[None].detach()}) != bits({"y": module(inputs)})
        first.pause(KvCache.KEEP)
        copied(inputs)  # it waits for no swap of the other module
        first.resume()
    first.pause(KvCache.KEEP)
    first.close()
    second.close()
    module(inputs)  # a module without an engine waits for nothing
    second.close()


def test_a_forward_that_another_library_has_set_is_called_and_comes_back() -> None:
    module, calls = torch.nn.Linear(2, 2), []

    def own(inputs: torch.Tensor) -> torch.Tensor:
        calls.append(inputs)
        return inputs

    module.forward = own
    engine = ModuleEngine(module)
    module(torch.ones(2))
    assert len(calls) == 1
    engine.close()
    assert module.forward is own


def test_an_error_that_ends_following_is_reported(store: MemoryStore, publisher: Publisher, follow: Follow) -> None:
    publisher.publish({"x": torch.zeros(3)})
    events: list[Event] = []
    swap = follow(torch.nn.Linear(2, 2), on_event=events.append)
    swap.start(poll=0.01)
    with pytest.raises(EngineRefused):
        swap.wait_for(seq=1, timeout=300)
    assert "follow-failed" in [event.name for event in events]


def test_times_that_are_no_longer_recorded_are_not_attributed(publisher: Publisher, follow: Follow) -> None:
    publisher.publish(qwen(0).state_dict())
    swap = follow(qwen(1))
    swap.sync()
    with pytest.raises(LookupError):
        swap.attribute(0.0, 1.0)
