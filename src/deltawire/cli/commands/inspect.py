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
    from ...delta.inspect import DeltaFacts, PayloadFacts, TensorFacts


class Order(str, Enum):
    """The order of the rows: by bytes in the delta, by share of changed elements (both largest first), or by name."""

    size = "size"
    density = "density"
    name = "name"


def inspect(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The delta file.", show_default=False)],
    base: Annotated[
        Path | None,
        typer.Option(
            "--base",
            metavar="CHECKPOINT",
            help="List the tensors of this checkpoint that change. The delta was made from it.",
            show_default=False,
        ),
    ] = None,
    sort: Annotated[
        Order,
        typer.Option("--sort", help="List the rows with the most bytes first, the highest share of changed weights first, or by name."),
    ] = Order.size,
    top: Annotated[int | None, typer.Option("--top", min=1, metavar="N", help="Show only the first N rows.", show_default=False)] = None,
    json: JsonOption = False,
) -> None:
    """Show what a delta file changes, how the changes are coded, and how many bits each of them takes.

    A delta codes all tensors of an element type together and does not name them. To list the tensors that change, pass the checkpoint that
    the delta was made from with --base.
    """
    with exit_codes(json):
        from ...delta.inspect import inspect_delta, list_changes
        from ...format.checkpoints.checkpoint import Checkpoint
        from ..delta_input import map_delta
        from ..output.delta_table import print_payloads, print_tensors

        delta = map_delta(file)
        facts = inspect_delta(delta)
        payloads = in_order(facts.payloads, sort)
        tensors = None if base is None else tensors_in_order(list_changes(Checkpoint(base), delta), sort)
        if json:
            print_json(_as_json(file, facts, payloads[:top], tensors, top))
        elif tensors is None:
            print_payloads(file, facts, payloads[:top])
        else:
            print_tensors(file, facts, tensors[:top], len(tensors))


def in_order(payloads: Sequence[PayloadFacts], order: Order) -> list[PayloadFacts]:
    """Return the payloads in this order; equal ones by name."""
    if order is Order.size:
        return sorted(payloads, key=lambda payload: (-payload.bytes, payload.label))
    if order is Order.density:
        return sorted(payloads, key=lambda payload: (-_density(payload), payload.label))
    return sorted(payloads, key=lambda payload: payload.label)


def tensors_in_order(tensors: Sequence[TensorFacts], order: Order) -> list[TensorFacts]:
    """Return the tensors in this order; equal ones by name. A file does not say how many bytes a tensor takes, so its changes count."""
    if order is Order.size:
        return sorted(tensors, key=lambda tensor: (-tensor.changed, tensor.name))
    if order is Order.density:
        return sorted(tensors, key=lambda tensor: (-_density(tensor), tensor.name))
    return sorted(tensors, key=lambda tensor: tensor.name)


def _density(facts: PayloadFacts | TensorFacts) -> float:
    return facts.changed / max(facts.elements, 1)


def _as_json(
    file: Path, facts: DeltaFacts, payloads: list[PayloadFacts], tensors: list[TensorFacts] | None, top: int | None
) -> dict[str, object]:
    changed = sum(payload.changed for payload in facts.payloads)
    found: dict[str, object] = {
        "delta": str(file),
        "bytes": facts.bytes,
        "before": facts.before.hex(),
        "after": facts.after.hex(),
        "changed": changed,
        "bits_per_change": figures.bits_per_change(facts.bytes, changed),
        "payloads": [_payload_as_json(payload) for payload in payloads],
        "added": {name: {"dtype": dtype, "shape": list(shape)} for name, (dtype, shape) in sorted(facts.added.items())},
        "removed": sorted(facts.removed),
        "aliases": dict(sorted(facts.aliases.items())),
    }
    if tensors is not None:
        found["tensors_changed"] = len(tensors)
        found["tensors"] = [_tensor_as_json(tensor) for tensor in tensors[:top]]
    return found


def _tensor_as_json(tensor: TensorFacts) -> dict[str, object]:
    return {
        "name": tensor.name,
        "dtype": tensor.dtype,
        "elements": tensor.elements,
        "changed": tensor.changed,
        "density": _density(tensor),
    }


def _payload_as_json(payload: PayloadFacts) -> dict[str, object]:
    return {
        "name": payload.name,
        "dtype": payload.dtype,
        "elements": payload.elements,
        "changed": payload.changed,
        "density": _density(payload),
        "bytes": payload.bytes,
        "bits_per_change": figures.bits_per_change(payload.bytes, payload.changed),
        "ulp_steps": {("1" if power == 0 else f"{1 << power}-{(2 << power) - 1}"): count for power, count in enumerate(payload.steps)},
        "modes": dict(payload.modes),
        "values": dict(payload.values),
        "chunks": [{"elements": elements, "changed": changed} for elements, changed in payload.density],
    }
