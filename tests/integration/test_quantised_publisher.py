"""Publish quantised weights. Every version is what `quantise_state` makes of the weights and of the version before."""

from __future__ import annotations

import gc
import json
import threading
import weakref

import ml_dtypes
import numpy as np
import pytest
from plain_reader import read_commits, read_states
from small_training import NEVER
from support import bits_of, copied, publisher_arguments

import deltawire
from deltawire.chain.maintenance.verify import verify
from deltawire.errors import CheckpointError, CommitOutcomeUnknown, LimitExceeded, NonFiniteWeights, UnquantisableWeight
from deltawire.format.checkpoints.checkpoint import Checkpoint
from deltawire.publish import append, background
from deltawire.publish.publisher import Publisher
from deltawire.publish.upload import data_objects
from deltawire.quantise import Recipe
from deltawire.quantise.quantise import quantise_state
from deltawire.store.memory import MemoryStore
from deltawire.store.wrapped import WrappedStore
from deltawire.subscribe import Subscriber, pull, reading_mirror
from deltawire.tensors.unwritten_state import PendingState
from deltawire.testing.faulty_store import After, Before, FaultyStore, call
from deltawire.warnings import LayoutChanged, QuantizationConfigMissing, RecipeChanged

RECIPES = ["fp8-block", "nvfp4", "int4"]
CONFIG = {"config.json": b'{"model_type": "tiny", "torch_dtype": "float32"}'}


class Masters:
    """The float32 weights of a small model in training, with layers that engines fuse."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(7)
        shapes = {f"model.layers.{i}.self_attn.{part}_proj.weight": (48, 64) for i in range(2) for part in "qkvo"}
        shapes |= {"model.embed_tokens.weight": (20, 64), "model.norm.weight": (64,)}
        self.state = {name: (self.random.standard_normal(shape) * 0.02).astype(np.float32) for name, shape in shapes.items()}

    def step(self, size: float = 2e-4) -> dict:
        for array in self.state.values():
            array += (self.random.standard_normal(array.shape) * size * (self.random.random(array.shape) < 0.2)).astype(np.float32)
        return copied(self.state)


def publisher(store, **given) -> Publisher:
    options = {"segment_bytes": 4000, "anchor_policy": NEVER, "quantise": "fp8-block", "attachments": CONFIG, "threads": 1}
    return Publisher(store, **publisher_arguments(**(options | given)))


def publish_all(store, states, **given) -> None:
    """Publish states one after the other: in the background, each is in the chain before the next one is passed."""
    with publisher(store, **given) as chain:
        for state in states:
            chain.publish(state)
            chain.flush()


def quantised(states, recipe: str | Recipe = "fp8-block", previous=None) -> list[dict]:
    """Return what is published for states, one after the other."""
    found = []
    for state in states:
        previous = quantise_state(state, recipe, previous)
        found.append(previous)
    return found


def versions(store) -> list[dict]:
    """Return the states of all versions as a reader sees them that knows nothing but docs/protocol.md."""
    return [state for _, state in sorted(read_states(store).items())]


def assert_same(found, expected) -> None:
    assert [bits_of(state) for state in found] == [bits_of(state) for state in expected]


@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_version_is_what_the_recipe_makes_of_the_one_before(recipe, background):
    store, masters = MemoryStore(), Masters()
    states = [masters.step() for _ in range(4)]
    publish_all(store, states, quantise=recipe, background=background)
    assert_same(versions(store), quantised(states, recipe))
    assert [commit["kind"] for commit in read_commits(store)] == ["fence", "anchor", "delta", "delta", "delta"]
    assert verify(store, deep=True).ok


def test_scales_are_sticky_across_a_restart_and_fresh_in_a_recipe_that_says_so():
    store, masters = MemoryStore(), Masters()
    states = [masters.step(size=2e-3) for _ in range(6)]
    publish_all(store, states[:3])
    publish_all(store, states[3:], background=True)
    expected = quantised(states)
    assert_same(versions(store), expected)
    fresh = Recipe.parse("fp8-block", sticky=False)
    assert bits_of(quantise_state(states[5], fresh)) != bits_of(expected[5])
    publish_all(store, [states[5]], quantise=fresh)  # the tensors are the same, so a delta leads there
    assert bits_of(versions(store)[-1]) == bits_of(quantise_state(states[5], fresh))
    assert read_commits(store)[-1]["kind"] == "delta"


@pytest.mark.filterwarnings("ignore::deltawire.warnings.DenseUpdates")
def test_readers_follow_a_quantised_chain_over_a_restart_a_skip_and_a_late_join(tmp_path):
    store, masters = MemoryStore(), Masters()
    states = [masters.step() for _ in range(22)]
    expected = quantised(states, "nvfp4")
    with Subscriber(store) as close, Subscriber(store) as far, Subscriber(store, tmp_path / "mirror") as mirror:
        for first, last in [(0, 12), (12, 22)]:
            with publisher(store, quantise="nvfp4") as chain:
                for index in range(first, last):
                    chain.publish(states[index], step=index)
                    assert close.sync().recipe.name == "nvfp4"
                    assert bits_of(close.state) == bits_of(expected[index])
                    if index == 0:
                        far.sync()
            mirror.sync()
        skips = [info.key for info in store.list("skip/")]
        assert skips
        far.sync()
        assert bits_of(far.state) == bits_of(expected[-1])
        with reading_mirror(tmp_path / "mirror") as path:
            assert bits_of(Checkpoint(path)) == bits_of(expected[-1])
            config = json.loads((path / "config.json").read_text())
    assert config["quantization_config"]["format"] == "nvfp4-pack-quantized"
    assert (config["model_type"], config["torch_dtype"]) == ("tiny", "bfloat16")
    pull(store, tmp_path / "late")
    assert bits_of(Checkpoint(tmp_path / "late")) == bits_of(expected[-1])


def test_a_version_names_its_recipe_and_release():
    store = MemoryStore()
    recipe = Recipe.parse("int4-128", ignore=("re:.*o_proj$",))
    state = {"a.q_proj.weight": np.ones((4, 128), np.float32), "a.o_proj.weight": np.ones((4, 5), np.float32)}
    with publisher(store, quantise=recipe) as chain:
        version = chain.publish(state)
    assert (version.recipe.name, version.recipe.release) == ("int4", 1)
    assert version.recipe.options == {"group_size": 128, "sticky": True, "ignore": ["re:.*o_proj$"]}
    commit = read_commits(store)[-1]
    assert (commit["version"], commit["recipe"]) == (3, version.recipe.plain())
    with publisher(store, quantise=recipe, resume_from_seq=version.seq) as chain:
        chain.publish(state)
    assert read_commits(store)[-1]["kind"] == "delta"


@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
def test_another_recipe_starts_from_a_full_checkpoint(background):
    store, masters, events = MemoryStore(), Masters(), []
    states = [masters.step() for _ in range(6)]
    with Subscriber(store) as reader:
        publish_all(store, states[:2], background=background)
        reader.sync()
        other = Recipe.parse("fp8-block", ignore=(*Recipe.parse("fp8-block").ignore, "re:.*layers\\.1\\..*"))
        for recipe, state in [("fp8-block-ue8m0", states[2]), (other, states[3]), (None, states[4])]:
            with pytest.warns(RecipeChanged, match="full checkpoint"):
                publish_all(store, [state, states[5]], quantise=recipe, background=background, dtype="bfloat16", on_event=events.append)
            reader.sync()
            expected = states[5] if recipe is None else quantised([state, states[5]], recipe)[-1]
            if recipe is None:
                expected = {name: array.astype(ml_dtypes.bfloat16) for name, array in expected.items()}
            assert bits_of(reader.state) == bits_of(expected)
    assert [commit["kind"] for commit in read_commits(store) if commit["kind"] != "fence"] == [
        *("anchor", "delta") * 4,
    ]
    assert [event.name for event in events].count("recipe-changed") == 3


def test_config_json_follows_the_recipe_if_the_chain_has_it():
    store, masters = MemoryStore(), Masters()

    def config(version):
        entry = next(entry for entry in read_commits(store)[version.seq]["attachments"] if entry["name"] == "config.json")
        return json.loads(store.get(entry["key"], limit=10_000))

    with publisher(store, quantise=None, dtype="bfloat16") as chain:
        assert "quantization_config" not in config(chain.publish(masters.step()))
    with publisher(store, attachments=None) as chain, pytest.warns(RecipeChanged):
        assert config(chain.publish(masters.step()))["quantization_config"]["quant_method"] == "fp8"
    with publisher(store, attachments=None) as chain:  # it is not uploaded again
        before = len(list(store.list("data/")))
        chain.publish(masters.state)
        assert config(chain.publish(masters.state))["quantization_config"]["quant_method"] == "fp8"
        assert len(list(store.list("data/"))) - before <= 3
    with publisher(store, attachments=None, quantise=None, dtype="bfloat16") as chain, pytest.warns(RecipeChanged):
        assert config(chain.publish(masters.step())) == {"model_type": "tiny", "torch_dtype": "bfloat16"}


def test_quantised_weights_without_a_config_give_a_warning():
    with publisher(MemoryStore(), attachments={}) as chain:
        with pytest.warns(QuantizationConfigMissing, match=r"config\.json"):
            chain.publish(Masters().state)
        chain.publish(Masters().state)


@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
@pytest.mark.parametrize("name", ["model.layers.1.self_attn.v_proj.weight", "model.norm.weight"])
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_weights_that_are_not_finite_are_refused_by_name(background, name, value):
    store, masters = MemoryStore(), Masters()
    with publisher(store, background=background) as chain:
        chain.publish(masters.step())
        chain.flush()
        bad = masters.step()
        bad[name].reshape(-1)[5] = value
        with pytest.raises(NonFiniteWeights, match=f"{name}.* publisher that does not quantise"):
            chain.publish(bad)
        chain.publish(masters.state)
    assert_same(versions(store)[1:], quantised([masters.state], previous=versions(store)[0]))


def test_a_kept_weight_that_overflows_its_type_is_refused():
    masters = Masters()
    masters.state["model.norm.weight"][0] = 1e6
    with publisher(MemoryStore(), dtype="float16") as chain, pytest.raises(NonFiniteWeights, match="norm"):
        chain.publish(masters.state)


class Gate(WrappedStore):
    """A store that lets no commit through while it is shut."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.open, self.reached = threading.Event(), threading.Event()
        self.open.set()

    def put_if_absent(self, key, data):
        if key.startswith("commit/") and not self.open.is_set():
            self.reached.set()
            assert self.open.wait(120)
        return super().put_if_absent(key, data)


def test_states_that_are_overtaken_leave_no_trace_in_the_scales():
    store, masters = Gate(), Masters()
    states = [masters.step(size=3e-3) for _ in range(5)]
    with publisher(store, background=True) as chain:
        chain.publish(states[0]).result(120)
        store.open.clear()
        chain.publish(states[1])
        assert store.reached.wait(120)
        for state in states[2:4]:  # the second takes the memory of the first, and is overtaken itself
            chain.publish(state)
        bad = copied(states[4])
        bad["model.norm.weight"][1] = np.nan
        with pytest.raises(NonFiniteWeights):
            chain.publish(bad)
        waiting = chain.publish(states[4])
        with pytest.raises(NonFiniteWeights):
            chain.publish(bad)
        store.open.set()
        assert waiting.result(120) is not None
    assert_same(versions(store), quantised([states[0], states[1], states[4]]))


def test_the_foreground_holds_one_segment_besides_the_baseline(monkeypatch):
    """No quantised segment is alive when the next one is made, and none after the call."""
    alive, most, quantise_segments = [], [], append.quantise_segments

    def watched(*arguments, **options):
        gc.collect()
        most.append(sum(1 for reference in alive if reference() is not None))
        made = quantise_segments(*arguments, **options)
        tensors = made.unwritten.tensors if isinstance(made, PendingState) else made.values()  # the first ones are not written yet
        alive.extend(map(weakref.ref, tensors))
        return made

    store, masters = MemoryStore(), Masters()
    monkeypatch.setattr(append, "quantise_segments", watched)
    with publisher(store) as chain:
        for _ in range(3):
            chain.publish(masters.step())
    assert len(alive) > 10
    assert max(most) == 0


def test_the_commit_does_not_wait_for_the_last_deltas_back(monkeypatch):
    """They are encoded in the call itself, after the commit. If its outcome is unknown, they are kept until it is known."""
    inner, encoded, encode = MemoryStore(), [], data_objects._deltas_back
    monkeypatch.setattr(data_objects, "_deltas_back", lambda *all: encoded.append(len(list(inner.list("commit/")))) or encode(*all))
    monkeypatch.setattr("deltawire.store.create_rule._FIRST_PAUSE", 0.0)
    slot = "commit/00000000000000000003"
    store = FaultyStore(inner, [After(call("put_if_absent", slot), "unknown", times=5), Before(call("get", slot), "unavailable", times=5)])
    masters = Masters()
    states = [masters.step() for _ in range(6)]
    with publisher(store, segment_bytes=1 << 30) as chain:
        for number, state in enumerate(states):
            given = copied(state)
            if number == 2:
                with pytest.raises(CommitOutcomeUnknown):
                    chain.publish(given)
            else:
                chain.publish(given)
            for array in given.values():
                array[...] = 0  # the caller may do what it likes with them afterwards
    assert encoded == [3, 4, 5, 6, 7]  # the fence, the versions before, and the version itself
    assert_same(versions(inner), quantised(states))
    skips = [json.loads(inner.get(info.key, limit=1 << 20)) for info in inner.list("skip/")]
    assert [(skip["base"]["seq"], skip["target"]["seq"]) for skip in skips] == [(1, 5)]  # over the version that was in doubt


@pytest.mark.parametrize("fault", [After, Before], ids=["landed", "not landed"])
@pytest.mark.parametrize("doubtful", [1, 3], ids=["checkpoint", "delta"])
def test_scales_of_a_version_in_doubt_stay_in_the_background_too(fault, doubtful, monkeypatch):
    monkeypatch.setattr("deltawire.store.create_rule._FIRST_PAUSE", 0.0)
    inner, weights = MemoryStore(), Masters().state
    states = [{name: array * np.float32(size) for name, array in weights.items()} for size in (1.5, 1.2, 2.0, 1.7, 1.8)]
    slot = f"commit/{doubtful:020}"
    store = FaultyStore(inner, [fault(call("put_if_absent", slot), "unknown", times=5), Before(call("get", slot), "unavailable", times=5)])
    with publisher(store, background=True) as chain:
        for number, state in enumerate(states, 1):
            pending = chain.publish(state)
            if number == doubtful:
                with pytest.raises(CommitOutcomeUnknown):
                    pending.result(120)
            else:
                assert pending.result(120).seq == number
    assert_same(versions(inner), quantised(states))


def test_the_background_makes_no_copy_besides_the_quantised_one(monkeypatch):
    """The snapshot is the quantised state: `copy_tensors` is never called."""
    monkeypatch.setattr(background, "copy_tensors", None)
    masters = Masters()
    publish_all(MemoryStore(), [masters.step() for _ in range(3)], background=True)


@pytest.mark.filterwarnings("ignore::deltawire.warnings.LayoutChanged")
def test_other_types_of_kept_weights_and_bundles():
    masters = Masters().state | {"adapter:a.q_proj.weight": np.ones((4, 5), np.float32)}
    store = MemoryStore()
    publish_all(store, [masters], dtype=lambda name, tensor: "float16" if "norm" in name else None)
    publish_all(store, [masters], dtype=None)
    chosen, default = versions(store)
    assert chosen["model.norm.weight"].dtype == np.float16
    assert chosen["model.embed_tokens.weight"].dtype == np.float32
    assert default["model.norm.weight"].dtype == default["model.embed_tokens.weight"].dtype == ml_dtypes.bfloat16
    for state in (chosen, default):
        assert bits_of({"a": state["adapter:a.q_proj.weight"]}) == bits_of({"a": masters["adapter:a.q_proj.weight"]})


def test_a_layer_that_cannot_be_quantised_is_refused_before_the_chain_changes():
    store = MemoryStore()
    with publisher(store, quantise="int4") as chain, pytest.raises(UnquantisableWeight, match="columns"):
        chain.publish({"a.q_proj.weight": np.ones((4, 33), np.float32)})
    assert len(read_commits(store)) == 1
    with pytest.raises(ValueError, match="there is no recipe"):
        publisher(store, quantise="fp7")


def test_a_recipe_that_a_version_cannot_record_is_refused():
    with pytest.raises(LimitExceeded, match="shorter patterns"):
        publisher(MemoryStore(), quantise=Recipe("fp8-block", ignore=tuple(f"layer.{i}" for i in range(2000))))


@pytest.mark.parametrize("config", [b"{", b"[1]", b"\xff"])
def test_a_config_that_cannot_say_how_weights_are_quantised_is_refused(config):
    store, masters = MemoryStore(), Masters()
    with publisher(store, attachments={"config.json": b"{}"}) as chain:
        chain.publish(masters.step())
    with publisher(store, attachments={"config.json": config}) as chain, pytest.raises(CheckpointError, match=r"^config\.json "):
        chain.publish(masters.step())
    assert [commit["kind"] for commit in read_commits(store)] == ["fence", "anchor", "fence"]


def test_other_tensors_of_the_same_recipe_are_reported_as_before():
    store, masters = MemoryStore(), Masters()
    with publisher(store) as chain:
        chain.publish(masters.state)
        del masters.state["model.norm.weight"]
        with pytest.warns(LayoutChanged):
            chain.publish(masters.state)
    assert_same(versions(store)[1:], quantised([masters.state]))


def test_digests_cover_the_published_bytes():
    masters = Masters()
    with publisher(MemoryStore()) as chain:
        assert chain.publish(masters.state).digest == deltawire.state_digest(quantise_state(masters.state, "fp8-block"))
