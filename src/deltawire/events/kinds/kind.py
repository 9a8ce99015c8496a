"""The description of one kind of event: its level, and its fields with their types and units."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

Value = int | float | str | None

Type = Literal["integer", "number", "text", "flag"]
"""A flag is true or false, or 1 or 0. An integer counts as a number, too."""
Level = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a kind of event.

    Parameters
    ----------
    name
        Its name.
    type
        The type of its values.
    meaning
        A sentence about it.
    unit
        The unit of a number, such as "seconds" or "bytes". It is empty for a plain number or a count.
    is_optional
        Whether an event may lack the field, or may have None.
    """

    name: str
    type: Type
    meaning: str
    unit: str = ""
    is_optional: bool = False

    @property
    def maybe(self) -> Field:
        """The same field, which an event may lack."""
        return replace(self, is_optional=True)

    def allows(self, value: object) -> bool:
        """Return whether a value has the type of the field.

        Parameters
        ----------
        value
            The value.
        """
        if value is None:
            return self.is_optional
        if self.type == "flag":
            return isinstance(value, bool) or (type(value) is int and value in (0, 1))
        if self.type == "integer":
            return type(value) is int
        if self.type == "number":
            return isinstance(value, (int, float)) and not isinstance(value, bool)
        return isinstance(value, str)


@dataclass(frozen=True, slots=True)
class EventKind:
    """One kind of event.

    Parameters
    ----------
    name
        The name of its events.
    level
        How important it is.
    meaning
        A sentence that says what happened.
    fields
        Its fields.
    others
        Further fields have names that are not known here, such as those of reward functions. This field has their type and meaning.
        Without it there are no further fields.
    is_warned
        Whether Python's `warnings` show it as well, so that no line is logged.
    """

    name: str
    level: Level
    meaning: str
    fields: tuple[Field, ...]
    others: Field | None = None
    is_warned: bool = False

    def fault(self, fields: Mapping[str, object]) -> str | None:
        """Return what is wrong with the fields of an event of this kind, or None.

        Parameters
        ----------
        fields
            The fields.
        """
        known = {field.name: field for field in self.fields}
        for field in self.fields:
            if not field.is_optional and field.name not in fields:
                return f"the field {field.name!r} is missing"
        for name, value in fields.items():
            rule = known.get(name, self.others)
            if rule is None:
                return f"the field {name!r} is not known"
            if not rule.allows(value):
                return f"the field {name!r} is {value!r}, which is not of type {rule.type}"
        return None
