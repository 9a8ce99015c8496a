"""Every public parameter is documented, in a section Parameters in NumPy's style, or by a docstring below a field."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator

import pytest

pytest.importorskip("trl", reason="some public names need TRL")

from public_parameters import documented, load, missing, public_names, texts


def test_every_public_parameter_is_documented() -> None:
    assert [line for name in public_names() for line in missing(name)] == []


PUBLISHERS = (
    "deltawire.Publisher",
    "deltawire.publish.sharded.publisher.ShardedPublisher",
    "deltawire.trainers.FSDPPublisher",
    "deltawire.trainers.DeltaWireCallback",
    "deltawire.trainers.trl.DeltaWireTransfer",
    "deltawire.rl.GrpoTrainer",
)
OTHER_DEFAULTS = {
    ("DeltaWireCallback", "background"),  # a training loop should not wait for the store
    ("GrpoTrainer", "dtype"),  # the trainer has float32 weights, and members sample with bfloat16
    ("GrpoTrainer", "refuse_nonfinite"),  # no step can be trained on rollouts of weights that are NaN
}
OTHER_MEANINGS = {("ShardedPublisher", "dtype")}  # it casts nothing
NOT_SHARED = {"timeout", "model"}
"""Parameters that have the same name in several of these classes, but differ in their meanings."""


def test_parameters_that_publishers_share_have_equal_defaults_and_texts() -> None:
    defaults: dict[str, object] = {}
    sentences: dict[str, str] = {}
    shared = set()
    for name in PUBLISHERS:
        value, own = load(name), name.rpartition(".")[2]
        known = texts(value.__doc__)
        for parameter in inspect.signature(value).parameters.values():
            if parameter.name in NOT_SHARED:
                continue
            if parameter.name in defaults:
                shared.add(parameter.name)
            if (own, parameter.name) not in OTHER_DEFAULTS:
                assert defaults.setdefault(parameter.name, parameter.default) == parameter.default, f"{name}: {parameter.name}"
            sentence = known[parameter.name].partition(". ")[0].rstrip(".")
            if (own, parameter.name) not in OTHER_MEANINGS and sentence != "As for `Publisher`":
                assert sentences.setdefault(parameter.name, sentence) == sentence, f"{name}: {parameter.name}"
    assert {"url", "run", "dtype", "quantise", "attachments", "options", "on_event"} <= shared


NUMBERS_OF_VERSIONS = {"at", "base", "loaded", "resume_from", "target", "version"}
"""Names that would not say whether a number counts commits or versions."""


def public_signatures() -> Iterator[tuple[str, inspect.Signature]]:
    """Yield what users call: functions, methods, and classes that are not records."""
    for name in public_names():
        value = load(name)
        functions = {name: value.__init__ if inspect.isclass(value) and not dataclasses.is_dataclass(value) else value}
        if inspect.isclass(value):
            methods = {attribute: getattr(method, "__func__", method) for attribute, method in vars(value).items()}
            functions |= {
                f"{name}.{attribute}": method for attribute, method in methods.items() if not attribute.startswith(("_", "test_"))
            }
        yield from ((full_name, inspect.signature(each)) for full_name, each in functions.items() if inspect.isfunction(each))


def test_a_commit_number_is_called_seq_and_passed_by_name() -> None:
    numbers = set()
    for name, signature in public_signatures():
        for parameter in signature.parameters.values():
            takes_number = str(parameter.annotation) in ("int", "int | None")
            assert not (takes_number and parameter.name in NUMBERS_OF_VERSIONS), f"{name}: is {parameter.name} a seq?"
            is_seq = parameter.name == "seq" or parameter.name.endswith("_seq")
            if takes_number and is_seq:
                assert parameter.kind is parameter.KEYWORD_ONLY, f"{name}: {parameter.name}"
                numbers.add(name)
    assert {"deltawire.Publisher", "deltawire.Subscriber.sync", "deltawire.pull"} <= numbers


def test_sections_are_read_as_numpy_writes_them() -> None:
    docstring = """Do something.

    Parameters
    ----------
    first, second : int
        Both are numbers: and this line is not a name.
    *others
        The rest.

    Returns
    -------
    result
        Not a parameter.
    """
    assert documented(docstring) == {"first", "second", "others"}
    both = "Both are numbers: and this line is not a name."
    assert texts(docstring) == {"first": both, "second": both, "others": "The rest."}
