"""Warnings about publications that users rarely want, with the remedy.

Each warning is given once, except that other tensors and a lower step are reported each time. Warnings do not change what is published;
`refuse_nonfinite` does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from ..chain.version import Version
from ..dtypes import DType
from ..errors import NonFiniteWeights
from ..events import OnEvent
from ..format.records.record_parts import RecipeRecord
from ..quantise.kept_weights import largest_kept, unmatched_patterns
from ..quantise.layout import QuantisedLayout
from ..tensors.bits import State
from ..tensors.finite import count_nonfinite
from ..warnings import (
    AttachmentsMissing,
    DeltawireWarning,
    DenseUpdates,
    LayoutChanged,
    NonFinitePublished,
    NothingQuantised,
    PatternUnmatched,
    QuantizationConfigMissing,
    RecipeChanged,
    StepWentBack,
    WideWeights,
    warn,
)
from .upload.segments import TensorTable

_DENSE_SHARE, _DENSE_VERSIONS = 0.9, 3
"""Deltas are called dense if more than this share of the weights changes in this many versions in a row."""

_MOST_NAMES = 3
"""Most tensors that a message names."""


class Advice:
    """Checks what one publisher publishes.

    Parameters
    ----------
    on_event
        Receives the warnings as events.
    has_dtype
        Whether the user said which type the engines serve.
    refuse_nonfinite
        Raise an error for weights that are NaN or infinite, instead of a warning.
    threads
        The number of threads that count such weights.
    """

    def __init__(self, on_event: OnEvent | None, *, has_dtype: bool, refuse_nonfinite: bool, threads: int | None = None) -> None:
        self._on_event = on_event
        self._has_dtype = has_dtype
        self._refuses = refuse_nonfinite
        self._threads = threads
        self._is_new = True
        self._given: set[type[DeltawireWarning]] = set()
        self._known_bad: set[str] = set()
        self._last: TensorTable | None = None
        self._dense = 0
        self._table: TensorTable | None = None
        self._step: int | None = None
        self._recipe: tuple[RecipeRecord | None] | None = None

    def follows(self, table: TensorTable | None, step: int | None) -> None:
        """Remember tensors and step of the version that the next one follows. A value that is None is not known, and stays as it was."""
        self._table = table or self._table
        self._step = self._step if step is None else step

    def follows_recipe(self, recipe: RecipeRecord | None) -> None:
        """Remember how the version that the next one follows is quantised."""
        self._recipe = (recipe,)

    def before(self, table: TensorTable, step: int | None, attachments: Collection[str] | None) -> None:
        """Warn before a version is published. Call it on the user's thread. `attachments` are file names; None if none are needed."""
        self.check_layout(table)
        self.check_step(step)
        if self._is_new and not self._has_dtype:
            warn_if_wide(zip(table.dtypes, table.sizes, strict=True), self._on_event)
        if self._is_new and attachments is not None and not {"config.json", "adapter_config.json"} & set(attachments):
            warn(
                AttachmentsMissing,
                "no config.json is published with the weights, so readers get a directory that does not load "
                "by itself. Give publish() the model instead of its state dict, or pass the checkpoint's directory as attachments. If "
                "readers have these files already, pass attachments={}.",
                self._on_event,
            )
        self._is_new = False

    def check_recipe(self, recipe: RecipeRecord | None, *, may_raise: bool = True) -> bool:
        """Warn if the next version is quantised in another way than the one that it follows. Returns whether it is.

        Its tensors differ, too, so `check_layout` need not warn.
        """
        if self._recipe is None or continues(recipe, self._recipe[0]):
            return False
        before, after = (str(each) if each else None for each in (self._recipe[0], recipe))
        options = ", with other options" if before == after else ""
        warn(
            RecipeChanged,
            f"the version before {_was_quantised('was', before)}, and this one {_was_quantised('is', after)}{options}. "
            "It is published as a full checkpoint, which every reader of this run loads. Readers that serve the run must support the new "
            "form. If they do not, stop, and publish a new run at another URL.",
            self._on_event,
            may_raise=may_raise,
            before=before or "no recipe",
            after=after or "no recipe",
        )
        self._table = None
        return True

    def check_quantization_config(self, *, is_published: bool) -> None:
        """Warn if quantised weights are published without a config.json."""
        if is_published or not self._is_first(QuantizationConfigMissing):
            return
        warn(
            QuantizationConfigMissing,
            "the weights are quantised, and no config.json with a quantization_config is published, so engines cannot load them. Give "
            "publish() the model instead of its state dict, or pass the checkpoint's directory as attachments. On the command line, "
            "publish the checkpoint's directory instead of one file.",
            self._on_event,
        )

    def check_quantised(self, layout: QuantisedLayout, *, may_raise: bool = True) -> None:
        """Warn if a recipe quantises none of the weights, or if patterns of its `ignore` match nothing."""
        if self._is_first(PatternUnmatched) and (unmatched := unmatched_patterns(layout)):
            warn(
                PatternUnmatched,
                f"these patterns match no layer, so they change nothing: {_listed(unmatched)}. A pattern is the full name of a layer, such "
                f"as {_example(layout)!r}, or re: and a regular expression that matches from the start of the name, such as "
                "'re:.*down_proj'.",
                self._on_event,
                may_raise=may_raise,
                recipe=str(layout.recipe),
                patterns=len(unmatched),
            )
        if layout.weights or not self._is_first(NothingQuantised):
            return
        kept = largest_kept(layout, _MOST_NAMES)
        reasons = "; ".join(f"{name!r}, because {reason}" for name, reason in kept)
        warn(
            NothingQuantised,
            f"recipe {layout.recipe} quantises none of these weights, so they are not smaller than without it. Not quantised: {reasons}. "
            "Recipes quantise weights of two dimensions whose names end in .weight, and the experts of a layer in one tensor.",
            self._on_event,
            may_raise=may_raise,
            recipe=str(layout.recipe),
            tensors=len(layout.specs),
        )

    def _is_first(self, category: type[DeltawireWarning]) -> bool:
        """Tell whether a warning has not been given yet, and note that it is given now."""
        is_first = category not in self._given
        self._given.add(category)
        return is_first

    def check_layout(self, table: TensorTable, *, may_raise: bool = True) -> None:
        """Warn if the next version has other tensors than the one that it follows."""
        if self._table is None or self._table == table:
            return
        added, removed, differing = _differences(self._table, table)
        told = [("added", added), ("removed", removed), ("of another shape or type", differing)]
        warn(
            LayoutChanged,
            "this state has other tensors than the version before: "
            f"{'; '.join(f'{len(names)} {how} ({_listed(names)})' for how, names in told if names)}. It is published as a full checkpoint, "
            "which every reader of this run loads. If it is another model, or a part of one, stop, and publish it as a new run at another "
            "URL. The version before is still in the chain. To go back to it, pass resume_from_seq to the publisher, or --resume-from on "
            "the command line.",
            self._on_event,
            may_raise=may_raise,
            added=len(added),
            removed=len(removed),
            differing=len(differing),
        )

    def check_step(self, step: int | None) -> None:
        """Warn if the next version has a lower step than the one that it follows."""
        if step is None or self._step is None or step >= self._step:
            return
        warn(
            StepWentBack,
            f"step {step} is published after step {self._step}, so readers go back. If the trainer was started again, load its own "
            "checkpoint first. To continue from an older version, pass resume_from_seq to the publisher, or --resume-from on the command "
            "line. For new training, publish a new run at another URL.",
            self._on_event,
            step=step,
            newest_step=self._step,
        )

    def check_finite(self, state: State) -> None:
        """Warn of weights that are NaN or infinite, or raise `NonFiniteWeights`. Call it before the state is published."""
        bad = count_nonfinite(state, threads=self._threads)
        if bad and self._refuses:
            raise NonFiniteWeights(f"{describe_nonfinite(bad)}. Nothing is published.")
        if bad.keys() - self._known_bad:
            self._known_bad |= bad.keys()
            warn(
                NonFinitePublished,
                f"{describe_nonfinite(bad)}. They are published; pass refuse_nonfinite=True to the publisher to have an error instead.",
                self._on_event,
                may_raise=False,
                tensors=len(bad),
                elements=sum(bad.values()),
            )

    def after(self, version: Version, table: TensorTable) -> None:
        """Warn if deltas save little. Call it after every version."""
        elements = table.elements
        is_like_last, self._last = self._last == table, table
        changed = elements if version.kind == "anchor" else version.changed  # a delta would not have been smaller
        self._dense = self._dense + 1 if is_like_last and changed > _DENSE_SHARE * elements else 0
        if self._dense == _DENSE_VERSIONS:
            remedy = (
                "Is every version a step of the same model, and the learning rate that of fine-tuning?"
                if self._has_dtype
                else 'If the trainer holds float32 weights and the engines serve bfloat16, pass dtype="bfloat16" to the publisher.'
            )
            warn(
                DenseUpdates,
                f"nearly all weights changed in each of the last {_DENSE_VERSIONS} versions, so deltas save little. {remedy}",
                self._on_event,
                may_raise=False,
                changed=changed,
                elements=elements,
            )


def continues(recipe: RecipeRecord | None, before: RecipeRecord | None) -> bool:
    """Tell whether a version that is quantised by a recipe, or not at all, can follow the version before by a delta."""
    return before is None if recipe is None else recipe.makes_same_tensors(before)


def _differences(old: TensorTable, new: TensorTable) -> tuple[list[str], list[str], list[str]]:
    """Return the names of tensors that were added, those that were removed, and those that have another shape or type, each in order."""
    before = dict(zip(old.names, zip(old.dtypes, old.shapes, strict=True), strict=True))
    after = dict(zip(new.names, zip(new.dtypes, new.shapes, strict=True), strict=True))
    differing = [name for name in new.names if name in before and before[name] != after[name]]
    return [name for name in new.names if name not in before], [name for name in old.names if name not in after], differing


def _example(layout: QuantisedLayout) -> str:
    """Return the name of a layer, for a message."""
    return next((weight.module for weight in layout.weights), "model.layers.0.mlp.down_proj")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in names[:_MOST_NAMES]) + (", …" if len(names) > _MOST_NAMES else "")


def _was_quantised(verb: str, recipe: str | None) -> str:
    return f"{verb} not quantised" if recipe is None else f"{verb} quantised by {recipe}"


def describe_nonfinite(counts: Mapping[str, int]) -> str:
    """Describe how many weights are NaN or infinite, and in which tensors, the worst first."""
    worst = sorted(counts, key=lambda name: (-counts[name], name))
    listed = ", ".join(f"{name!r} ({counts[name]:,})" for name in worst[:_MOST_NAMES])
    more = f" and {len(worst) - _MOST_NAMES} more tensors" if len(worst) > _MOST_NAMES else ""
    total = sum(counts.values())
    return f"{total:,} {'weight is' if total == 1 else 'weights are'} NaN or infinite, in {listed}{more}"


def warn_if_wide(tensors: Iterable[tuple[DType, int]], on_event: OnEvent | None, *, may_raise: bool = True) -> None:
    """Warn if most floating-point weights, given as types and bytes of tensors, are float32 or float64."""
    sizes = {"F32": 0, "F64": 0}
    for dtype, size in tensors:
        if dtype.name.startswith(("F", "BF")):
            sizes[dtype.name] = sizes.get(dtype.name, 0) + size
    if (sizes["F32"] + sizes["F64"]) * 2 <= sum(sizes.values()):
        return
    found = "float32" if sizes["F32"] >= sizes["F64"] else "float64"
    warn(
        WideWeights,
        f"these weights are {found}, and are published as {found}: nothing is cast unless you ask for it. Nearly all {found} weights "
        'change at every step, so deltas save little. If the engines serve bfloat16, pass dtype="bfloat16" to the publisher, and deltas '
        f"are a small part of the weights; on the command line, save the checkpoint as bfloat16 first. If the engines serve {found}, "
        f'pass dtype="{found}"; on the command line, ignore this warning.',
        on_event,
        may_raise=may_raise,
        dtype=found,
    )
