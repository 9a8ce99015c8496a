"""Recipes: how weights are quantised before they are published."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from ..dtypes import DType, dtype_named

RELEASES: Final = {"fp8-block": 1, "fp8-channel": 1, "fp8-tensor": 1, "nvfp4": 1, "mxfp4": 1, "int4": 1}
"""The release of each recipe. A release changes whenever the same weights would become other bytes."""

SPELLINGS: Final = ("fp8-block", "fp8-block-ue8m0", "fp8-channel", "fp8-tensor", "nvfp4", "mxfp4", "int4", "int4-128")
"""The spellings that `Recipe.parse` accepts."""

DEFAULT_IGNORE: Final = (
    "re:(.*\\.)?lm_head$",
    "re:(.*\\.)?(embed_tokens|embed_positions|embed_out|wte|wpe|word_embeddings|embeddings?)(\\..*)?$",
    "re:.*norm[^.]*$",
    "re:.*\\blora_",
    "re:.*gate$",
    "re:.*router(\\..*)?$",
    "re:(.*\\.)?(visual|vision_tower|vision_model|multi_modal_projector)(\\..*)?$",
)
"""The modules that stay in their own precision by default: the head, embeddings, norms, LoRA adapters, routers and gates of experts,
vision towers."""

ScaleFormat: TypeAlias = Literal["fp32", "ue8m0"]
Element: TypeAlias = Literal["e4m3", "e2m1", "int4"]
RecipeLike: TypeAlias = "str | Recipe"


class BlockShape(NamedTuple):
    """The numbers of rows and columns of a weight that share a scale. None means all of them."""

    rows: int | None
    columns: int | None

    def grid(self, rows: int, columns: int) -> tuple[int, int]:
        """Return how many blocks a weight of this shape has, vertically and horizontally."""
        return (
            1 if self.rows is None else -(-rows // self.rows),
            1 if self.columns is None else -(-columns // self.columns),
        )

    def rows_of_grid(self, start: int, stop: int) -> tuple[int, int]:
        """Return the range of rows of blocks that the rows from `start` to `stop` of a weight lie in."""
        return (0, 1) if self.rows is None else (start // self.rows, -(-stop // self.rows))


def check_pattern(pattern: str) -> None:
    """Raise `ValueError` if a pattern of `ignore` is not valid.

    Parameters
    ----------
    pattern
        The name of a module, or "re:" and a regular expression.
    """
    if not pattern:
        raise ValueError("an empty pattern matches no layer")
    if pattern.startswith("re:"):
        try:
            re.compile(pattern.removeprefix("re:"))
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"{pattern!r} is not a valid regular expression: {error}") from None


@dataclass(frozen=True)
class Recipe:
    """A deterministic function from weights to the tensors that engines load (docs/quantise.md).

    `Recipe.parse("fp8-block")` makes one from its spelling.

    Parameters
    ----------
    name
        "fp8-block", "fp8-channel", "fp8-tensor", "nvfp4", "mxfp4" or "int4".
    scale
        The format of the scales of fp8-block: "fp32", or "ue8m0" for powers of two.
    group_size
        The number of weights in a row that share a scale: 32 or 128 for int4. By default it is what the recipe says.
    ignore
        The modules that are not quantised. A pattern is the name of a module, or "re:" and a regular expression that matches from the
        start of the name.
    sticky
        Whether a scale stays as long as its block fits it and it is at most twice as wide as needed. If false, each version has fresh
        scales.
    release
        The release of the recipe. Only the newest one can be used; records of older versions name older ones.
    """

    name: str
    scale: ScaleFormat = "fp32"
    group_size: int | None = None
    ignore: tuple[str, ...] = DEFAULT_IGNORE
    sticky: bool = True
    release: int = 0

    def __post_init__(self) -> None:
        if self.name not in RELEASES:
            raise ValueError(f"there is no recipe {self.name!r}; choose one of {', '.join(SPELLINGS)}")
        if not self.release:
            object.__setattr__(self, "release", RELEASES[self.name])
        if self.scale != "fp32" and (self.scale != "ue8m0" or self.name != "fp8-block"):
            raise ValueError(f"recipe {self.name} does not have scales of format {self.scale!r}")
        sizes = {"nvfp4": (16,), "mxfp4": (32,), "int4": (32, 128)}.get(self.name)
        if self.group_size is None:
            object.__setattr__(self, "group_size", sizes[0] if sizes else None)
        elif sizes is None or self.group_size not in sizes:
            allowed = f"groups of {' or '.join(map(str, sizes))}" if sizes else "no groups"
            raise ValueError(f"recipe {self.name} has {allowed}, not groups of {self.group_size}")
        if isinstance(self.ignore, str):
            raise ValueError(f"ignore is a sequence of patterns, not the string {self.ignore!r}")
        object.__setattr__(self, "ignore", tuple(self.ignore))
        for pattern in self.ignore:
            check_pattern(pattern)

    @classmethod
    def parse(cls, spelling: str, **options: Any) -> Recipe:
        """Return the recipe with this spelling, one of `SPELLINGS`. Raise `ValueError` for any other.

        Parameters
        ----------
        spelling
            The recipe, such as "fp8-block" or "int4-128".
        options
            `ignore` and `sticky`, as for the class.
        """
        if spelling not in SPELLINGS:
            raise ValueError(f"there is no recipe {spelling!r}; choose one of {', '.join(SPELLINGS)}")
        if spelling == "fp8-block-ue8m0":
            return cls("fp8-block", scale="ue8m0", **options)
        if spelling == "int4-128":
            return cls("int4", group_size=128, **options)
        return cls(spelling, **options)

    @classmethod
    def of(cls, recipe: RecipeLike) -> Recipe:
        """Return a recipe as it is, or the one with this spelling.

        Parameters
        ----------
        recipe
            The recipe, or its spelling.
        """
        return recipe if isinstance(recipe, Recipe) else cls.parse(recipe)

    @property
    def spelling(self) -> str:
        """The recipe as `parse` accepts it."""
        if self.scale == "ue8m0":
            return f"{self.name}-ue8m0"
        return f"{self.name}-{self.group_size}" if self.name == "int4" and self.group_size != 32 else self.name

    def __str__(self) -> str:
        return self.spelling

    @cached_property
    def block(self) -> BlockShape:
        """The weights that share a scale. For nvfp4: those that share a scale of 8 bits."""
        if self.name == "fp8-block":
            return BlockShape(128, 128)
        if self.name == "fp8-tensor":
            return BlockShape(None, None)
        return BlockShape(1, self.group_size)

    @cached_property
    def element(self) -> Element:
        """The type of the codes."""
        return "e4m3" if self.name.startswith("fp8") else "int4" if self.name == "int4" else "e2m1"

    @cached_property
    def largest(self) -> float:
        """The quotient of the largest weight of a block and its fresh scale."""
        return {"e4m3": 448.0, "e2m1": 6.0, "int4": 7.5}[self.element]

    @cached_property
    def fits_up_to(self) -> float:
        """The largest quotient of a weight and its scale with which the scale may stay: the nearest code is still the largest one.

        An integer of 4 bits is at most 8 in magnitude, though 8 itself becomes 7.
        """
        return {"e4m3": 464.0, "e2m1": 7.0, "int4": 8.0}[self.element]

    @cached_property
    def has_global_scale(self) -> bool:
        """Whether a weight has a second scale, for all of its blocks."""
        return self.name == "nvfp4"

    @cached_property
    def shares_scales(self) -> bool:
        """Whether layers that engines fuse (q, k and v; gate and up) must have the same scale: one number per weight."""
        return self.name in ("nvfp4", "fp8-tensor")

    def scale_dtype(self, source: DType) -> DType:
        """Return the type of the scales of a weight.

        Parameters
        ----------
        source
            The type of the weight.
        """
        fixed = {"fp8-block": "F32", "nvfp4": "F8_E4M3", "mxfp4": "U8"}.get(self.name)
        return source if fixed is None else dtype_named(fixed)

    def to_json(self) -> dict[str, Any]:
        """Return the recipe as a record: what made a version, with its release and all options."""
        found: dict[str, Any] = {"name": self.name, "release": self.release, "sticky": self.sticky, "ignore": list(self.ignore)}
        if self.name == "fp8-block":
            found["scale"] = self.scale
        if self.name == "int4":
            found["group_size"] = self.group_size
        return found

    def makes_same_tensors(self, other: Recipe) -> bool:
        """Tell whether a version of this recipe can follow a version of another one by a delta: only `sticky` may differ.

        Parameters
        ----------
        other
            The other recipe.
        """
        return dataclasses.replace(self, sticky=True) == dataclasses.replace(other, sticky=True)
