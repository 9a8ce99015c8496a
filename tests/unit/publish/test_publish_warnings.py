"""A publisher warns about input that is probably a mistake, and says what to do instead."""

from __future__ import annotations

import contextlib
import warnings

import ml_dtypes
import numpy as np
import pytest

from deltawire.chain.reader_options import ReaderOptions
from deltawire.errors import NonFiniteWeights
from deltawire.publish import Publisher
from deltawire.quantise import DEFAULT_IGNORE, Recipe
from deltawire.store.memory import MemoryStore
from deltawire.subscribe import Subscriber
from deltawire.warnings import (
    AttachmentsMissing,
    DenseUpdates,
    LayoutChanged,
    NonFinitePublished,
    NothingQuantised,
    PatternUnmatched,
    StepWentBack,
    WideWeights,
)

BF16 = ml_dtypes.bfloat16
CONFIG = {"config.json": b"{}"}


@contextlib.contextmanager
def seen():
    """Collect the categories of the warnings that are raised within the context."""
    found: list[type[Warning]] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
    found += [each.category for each in caught]


def publish(*states, events=None, store=None, **options):
    with Publisher(store or MemoryStore(), on_event=None if events is None else events.append, **options) as publisher:
        for step, state in enumerate(states):
            publisher.publish(state, step=step)


def wide(steps: int = 1):
    return [{"w": np.full(400, step + 0.5, np.float32), "norm": np.ones(9, BF16)} for step in range(steps)]


def test_float32_is_published_as_it_is_with_a_warning_that_names_the_remedy():
    events, store = [], MemoryStore()
    with pytest.warns(WideWeights, match='pass dtype="bfloat16" to the publisher') as caught:
        publish(*wide(2), events=events, store=store, attachments=CONFIG)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert [event.name for event in events].count("wide-weights") == 1
    with Subscriber(store, options=ReaderOptions(pin=False)) as subscriber:
        subscriber.sync()
        assert subscriber.state["w"].dtype == np.float32


def test_a_recipe_that_quantises_nothing_is_named_once_with_the_reasons():
    shapes = {"lm_head.weight": (64, 8), "model.embed": (32, 8), "x.weight": (4, 4, 4), "ids": (1,)}
    state = {name: np.ones(shape, np.int32 if name == "ids" else BF16) for name, shape in shapes.items()}
    events = []
    with pytest.warns(NothingQuantised, match="recipe fp8-block quantises none of these weights") as caught:
        publish(state, state, events=events, quantise="fp8-block", attachments=CONFIG)
    assert len(caught) == 1
    text = str(caught[0].message)
    assert r"'lm_head.weight', because the pattern 're:(.*\\.)?lm_head$' matches its layer; " in text
    assert "'model.embed', because its name does not end in .weight; 'x.weight', because it has 3 dimensions, not 2." in text
    assert [event.name for event in events].count("nothing-quantised") == 1


def test_patterns_that_match_no_layer_are_named_once():
    shapes = {"a.up.weight": (8, 8), "a.norm.weight": (8,), "m.experts.gate_up_proj": (2, 8, 4), "m.experts.down_proj": (2, 4, 4)}
    state = {name: np.ones(shape, BF16) for name, shape in shapes.items()}
    matching = ["a.up", "a.norm", "m.experts.down_proj", r"re:m\.experts\.\d\.(up|gate)_proj"]
    recipe = Recipe.parse("fp8-block", ignore=[*DEFAULT_IGNORE, *matching[1:], "up", "a.up.weight", "re:up"])
    with pytest.warns(PatternUnmatched, match="change nothing: 'up', 'a.up.weight', 're:up'. .*, such as 'a.up', or re: ") as caught:
        publish(state, state, quantise=recipe, attachments=CONFIG)
    assert len(caught) == 1
    with pytest.warns(NothingQuantised) as caught:
        publish(state, quantise=Recipe.parse("fp8-block", ignore=matching), attachments=CONFIG)
    assert len(caught) == 1
    with pytest.raises(ValueError, match="empty pattern"):
        Recipe.parse("fp8-block", ignore=[""])


def test_the_remedies_name_the_options_of_the_command_line_too():
    for category, states, steps in ((LayoutChanged, [wide()[0], {"w": np.ones(3, BF16)}], (0, 1)), (StepWentBack, wide(2), (1, 0))):
        with Publisher(MemoryStore(), dtype="bfloat16", attachments=CONFIG) as publisher:
            publisher.publish(states[0], step=steps[0])
            with pytest.warns(category, match="resume_from_seq to the publisher, or --resume-from on the command line"):
                publisher.publish(states[1], step=steps[1])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", lambda name, tensor: None])
def test_no_warning_where_the_user_said_what_the_fleet_serves(dtype):
    with seen() as found:
        publish(*wide(), dtype=dtype, attachments=CONFIG)
    assert found == []


def test_a_few_float32_tensors_among_bfloat16_give_no_warning():
    with seen() as found:
        publish({"w": np.ones(400, BF16), "router": np.ones(90, np.float32), "ids": np.arange(9000)}, attachments=CONFIG)
    assert found == []


def test_nearly_all_weights_changing_three_times_in_a_row_is_reported_once():
    events = []
    with pytest.warns(DenseUpdates, match="nearly all weights changed in each of the last 3 versions") as caught:
        publish(*wide(9), dtype="float32", events=events, attachments=CONFIG)
    assert len(caught) == 1
    assert [event.fields["elements"] for event in events if event.name == "dense-updates"] == [409]


def test_sparse_updates_are_not_reported_and_one_of_them_starts_the_count_again():
    states = wide(8)
    states[3] = {name: array.copy() for name, array in states[2].items()}
    states[6] = {name: array.copy() for name, array in states[5].items()}
    with seen() as found:
        publish(*states, dtype="float32", attachments=CONFIG)
    assert found == []


def test_missing_attachments_are_reported_unless_the_user_wants_none():
    state = {"w": np.ones(9, BF16)}
    store = MemoryStore()
    with pytest.warns(AttachmentsMissing, match=r"Give publish\(\) the model"):
        publish(state, store=store)
    with seen() as found:
        publish(state, store=store)  # this continues the chain, and the warning was given when it began
        publish(state, attachments={})
        publish(state, attachments=CONFIG)
        publish(state, attachments={"adapter_config.json": b"{}"})  # readers load a LoRA adapter with its own config
    assert found == []
    with pytest.warns(AttachmentsMissing):
        publish(state, attachments={"tokenizer.json": b"{}"})


BAD = {"fine": np.ones(5, BF16), "embed": np.array([1, np.nan, np.inf, 4], BF16), "head": np.array([-np.inf], np.float16)}
TOLD = r"3 weights are NaN or infinite, in 'embed' \(2\), 'head' \(1\)"


@pytest.mark.parametrize("background", [False, True])
def test_weights_that_are_not_finite_are_reported_and_published(background):
    events = []
    with pytest.warns(NonFinitePublished, match=TOLD) as caught:
        publish(BAD, BAD, events=events, background=background, attachments={})
    assert len(caught) == 1
    assert [dict(e.fields, message="") for e in events if e.name == "non-finite-published"] == [
        {"message": "", "tensors": 2, "elements": 3}
    ]


@pytest.mark.parametrize("background", [False, True])
def test_weights_that_are_not_finite_are_refused_on_demand_and_readers_keep_the_version_before(background):
    store, good = MemoryStore(), {name: np.ones_like(array) for name, array in BAD.items()}
    with Publisher(store, refuse_nonfinite=True, background=background, attachments={}) as publisher:
        publisher.publish(good, step=1)
        publisher.flush()
        refused = pytest.raises(NonFiniteWeights, match=TOLD + r"\. Nothing is published")
        if background:
            publisher.publish(BAD, step=2)
            with refused:
                publisher.flush()
        else:
            with refused:
                publisher.publish(BAD, step=2)
        publisher.publish(good, step=3)  # the publisher still works
        publisher.flush()
        assert (publisher.version.step, publisher.version.updates) == (3, 2)


def test_weights_that_become_infinite_by_the_cast_are_refused_too():
    state = {"w": np.array([1.0, 1e6], np.float32)}
    with pytest.raises(NonFiniteWeights, match=r"^1 weight is NaN or infinite, in 'w' \(1\)"):
        publish(state, dtype="float16", refuse_nonfinite=True, attachments={})


MODEL = {name: np.ones(5, BF16) for name in ("a", "b", "c", "d", "e", "f")}


@pytest.mark.parametrize("background", [False, True])
def test_another_model_is_published_with_a_warning_that_names_its_tensors(background):
    events, store = [], MemoryStore()
    other = {"f": np.ones((5, 1), BF16), "e": np.ones(5, np.float16), "z": np.ones(2, BF16)}
    told = r"1 added \('z'\); 4 removed \('a', 'b', 'c', …\); 2 of another shape or type \('e', 'f'\)\..* new run at another URL"
    with Publisher(store, background=background, attachments={}, on_event=events.append) as publisher:
        publisher.publish(MODEL)
        with pytest.warns(LayoutChanged, match=told) as caught:
            publisher.publish(other)
        assert [caught[0].filename, len(caught)] == [__file__, 1]
        with seen() as found:
            publisher.publish(other)
        assert found == []
        publisher.flush()
        assert publisher.version.state_bytes == 24
    counts = [{**event.fields, "message": ""} for event in events if event.name == "layout-changed"]
    assert counts == [{"message": "", "added": 1, "removed": 4, "differing": 2}]


def test_a_publisher_that_continues_a_run_compares_with_its_newest_version_and_can_be_stopped():
    store = MemoryStore()
    publish(MODEL, store=store, attachments={})
    with Publisher(store, attachments={}) as publisher:
        with warnings.catch_warnings():
            warnings.simplefilter("error", LayoutChanged)
            with pytest.raises(LayoutChanged, match=r": 1 removed \('a'\)\. "):
                publisher.publish({name: MODEL[name] for name in "bcdef"})
        assert publisher.version.updates == 1
        with seen() as found:
            publisher.publish(MODEL)
        assert found == []


@pytest.mark.parametrize("background", [False, True])
def test_a_trainer_that_begins_again_is_warned_that_readers_go_back(background):
    events, store = [], MemoryStore()
    with Publisher(store, attachments={}) as publisher:
        with seen() as found:
            for step in (None, 7, 7, None, 8):
                last = publisher.publish(MODEL, step=step)
        assert found == []
    with Publisher(store, attachments={}, background=background, on_event=events.append) as publisher:
        with pytest.warns(StepWentBack, match=r"step 0 is published after step 8.* own checkpoint first.* resume_from_seq") as caught:
            publisher.publish(MODEL, step=0)
        assert [caught[0].filename, len(caught)] == [__file__, 1]
        with seen() as found:
            publisher.publish(MODEL, step=1)
        assert found == []
    assert [event.fields["newest_step"] for event in events if event.name == "step-went-back"] == [8]
    with Publisher(store, attachments={}, resume_from_seq=last.seq) as publisher, seen() as found:
        publisher.publish(MODEL, step=3)
    assert found == []
    warned = pytest.warns(StepWentBack, match="step 2 is published after step 3")
    with Publisher(store, attachments={}, background=background, starts_full=True) as publisher, warned:
        publisher.publish(MODEL, step=2)
