"""`deltawire inspect FILE`."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..options.common import JsonOption
from ..output import figures
from ..output.terminal import print_json
from ..process.exit_codes import exit_codes

if TYPE_CHECKING:
    from ...delta.inspect import DeltaFacts, PayloadFacts


class Order(str, Enum):
    """The order of the tensors: by bytes in the delta, by share of changed elements (both largest first), or by name."""

    size = "size"
    density = "density"
    name = "name"


def inspect(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The delta file.", show_default=False)],
    sort: Annotated[
        Order,
        typer.Option("--sort", help="List the tensors with the most bytes first, the highest share of changed weights first, or by name."),
    ] = Order.size,
    top: Annotated[int | None, typer.Option("--top", min=1, metavar="N", help="Show only the first N tensors.", show_default=False)] = None,
    json: JsonOption = False,
) -> None:
    """Show what a delta file changes, tensor by tensor.

    The table also shows how the changes are coded, and how many bits each of them takes. The command does not need the base checkpoint.
    """
    with exit_codes(json):
        from ...delta.inspect import inspect_delta
        from ..delta_input import map_delta
        from ..output.delta_table import print_table

        facts = inspect_delta(map_delta(file))
        tensors = in_order(facts.payloads, sort)
        if json:
            print_json(_as_json(file, facts, tensors[:top]))
        else:
            print_table(file, facts, tensors[:top])


def in_order(tensors: Sequence[PayloadFacts], order: Order) -> list[PayloadFacts]:
    """Return the tensors in this order; equal ones by name."""
    if order is Order.size:
        return sorted(tensors, key=lambda tensor: (-tensor.bytes, tensor.label))
    if order is Order.density:
        return sorted(tensors, key=lambda tensor: (-tensor.changed / max(tensor.elements, 1), tensor.label))
    return sorted(tensors, key=lambda tensor: tensor.label)


def _as_json(file: Path, facts: DeltaFacts, tensors: list[PayloadFacts]) -> dict[str, object]:
    changed = sum(tensor.changed for tensor in facts.payloads)
    return {
        "delta": str(file),
        "bytes": facts.bytes,
        "before": facts.before.hex(),
        "after": facts.after.hex(),
        "changed": changed,
        "tensors_changed": len(facts.payloads),
        "bits_per_change": figures.bits_per_change(facts.bytes, changed),
        "tensors": [_tensor_as_json(tensor) for tensor in tensors],
        "added": {name: {"dtype": dtype, "shape": list(shape)} for name, (dtype, shape) in sorted(facts.added.items())},
        "removed": sorted(facts.removed),
        "aliases": dict(sorted(facts.aliases.items())),
    }


def _tensor_as_json(tensor: PayloadFacts) -> dict[str, object]:
    return {
        "name": tensor.name,
        "dtype": tensor.dtype,
        "elements": tensor.elements,
        "changed": tensor.changed,
        "density": tensor.changed / tensor.elements if tensor.elements else 0.0,
        "bytes": tensor.bytes,
        "bits_per_change": figures.bits_per_change(tensor.bytes, tensor.changed),
        "ulp_steps": {("1" if power == 0 else f"{1 << power}-{(2 << power) - 1}"): count for power, count in enumerate(tensor.steps)},
        "modes": dict(tensor.modes),
        "values": dict(tensor.values),
        "chunks": [{"elements": elements, "changed": changed} for elements, changed in tensor.density],
    }
