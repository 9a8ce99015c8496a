"""Warnings about things that are allowed, but that most users do not want. Each category has one remedy, which its message names.

    UserWarning
    └── DeltawireWarning
        ├── WideWeights         float32 weights are published, and no `dtype` says that the engines serve float32
        ├── DenseUpdates        nearly all weights change in every version, so deltas save little
        ├── AttachmentsMissing  no config.json is published, so readers get a directory that cannot be loaded
        ├── AttachmentLeftOut   a file of a version has the name of a mirror's own record, so mirrors leave it out
        ├── NonFinitePublished  NaN or infinite weights are published
        ├── QuantizationConfigMissing  weights are quantised, and no config.json tells engines how
        ├── NothingQuantised    a recipe is given, and none of the weights is quantised
        ├── PatternUnmatched    a pattern of layers that are not to be quantised matches no layer
        ├── RecipeChanged       a version is quantised by another recipe than the version before
        ├── LayoutChanged       a version has other tensors than the version before, as if it were another model
        ├── StepWentBack        a version has a lower step than the version before, as if training had begun again
        └── VersionsLost        versions that `publish` accepted did not reach the store

Python shows each of them once per line of your code. `warnings.filterwarnings("error", category=...)` turns one into an error,
`"ignore"` hides it. Each warning is also an event.
"""

from __future__ import annotations

import logging
import sys
import warnings

from .events import OnEvent, Value, emit


class DeltawireWarning(UserWarning):
    """The base class of all warnings."""

    event = ""
    """The name of the event that goes with the warning."""


class WideWeights(DeltawireWarning):
    """The weights are float32 or float64, and the publisher has no `dtype`."""

    event = "wide-weights"


class DenseUpdates(DeltawireWarning):
    """Nearly all weights changed in several versions in a row."""

    event = "dense-updates"


class AttachmentsMissing(DeltawireWarning):
    """No config.json is published with the weights."""

    event = "attachments-missing"


class AttachmentLeftOut(DeltawireWarning):
    """A file of a version has the name of a mirror's own record. Earlier publishers allowed that name."""

    event = "attachment-left-out"


class NonFinitePublished(DeltawireWarning):
    """Some weights are NaN or infinite, and are published."""

    event = "non-finite-published"


class QuantizationConfigMissing(DeltawireWarning):
    """The weights are quantised, and no config.json is published that tells engines how."""

    event = "quantization-config-missing"


class NothingQuantised(DeltawireWarning):
    """A recipe is given, and it quantises none of the weights, so all of them are published in their own precision."""

    event = "nothing-quantised"


class PatternUnmatched(DeltawireWarning):
    """A pattern of layers that are not to be quantised matches no layer of the model, so it changes nothing."""

    event = "pattern-unmatched"


class RecipeChanged(DeltawireWarning):
    """A version is quantised by another recipe than the version before, or only one of the two is quantised. It is a full checkpoint."""

    event = "recipe-changed"


class LayoutChanged(DeltawireWarning):
    """A version has tensors of other names, shapes or types than the version before, so it is published as a full checkpoint."""

    event = "layout-changed"


class StepWentBack(DeltawireWarning):
    """A version has a lower step than the version before, and the publisher was not opened with `resume_from_seq`."""

    event = "step-went-back"


class VersionsLost(DeltawireWarning):
    """Versions that `publish` accepted did not reach the store."""

    event = "versions-lost"


def warn(
    category: type[DeltawireWarning], message: str, on_event: OnEvent | None = None, *, may_raise: bool = True, **fields: Value
) -> None:
    """Issue a Python warning that points at the caller's code, and the event of its category.

    If the user's filters turn the warning into an error, it is raised. Without `may_raise` it is logged instead, for example on our own
    threads and while work is half done.
    """
    emit(on_event, category.event, message=message, **fields)
    try:
        warnings.warn(message, category, stacklevel=_level_of_the_caller())
    except Warning:
        if may_raise:
            raise
        logging.getLogger("deltawire").error("%s: %s", category.__name__, message)


def _level_of_the_caller() -> int:
    """Return the `stacklevel` of the first frame outside of this package, as seen from `warn`."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).split(".")[0] == "deltawire":
        level, frame = level + 1, frame.f_back
    return level
