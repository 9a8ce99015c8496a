"""Compare bits per changed weight of quantised updates with peers and the order-0 bound, and measure what sticky scales cost.

Sizes include headers, but for the last column.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from peers import DenseXor, GapXor, Int32Value, Peer
from report import Table
from workloads import BF16, Array, State, code_bound_bits, codes_of, synthetic_masters, trace_steps, update_size

import deltawire
from deltawire.quantise import Recipe, quantisation_error
from deltawire.quantise.layout import QuantisedLayout
from deltawire.quantise.quantise import quantise_state

RECIPES = ("fp8-block", "fp8-block-ue8m0", "fp8-channel", "fp8-tensor", "nvfp4", "mxfp4", "int4", "int4-128")
KINDS = ("sticky", "fresh")
LARGE = (("fp8-block", "fp8-block-ue8m0"), ("fp8-channel", "fp8-tensor"), ("nvfp4", "mxfp4", "int4", "int4-128"))
"""The recipes of the large state. Those of one tuple and one kind are in memory at once: two states of each, about 4 bytes per weight."""
_PEERS: tuple[Peer, ...] = (DenseXor(), GapXor(), Int32Value())
_BITS_OF_A_SCALE = 40
"""The bits that the order-0 bound counts for each scale that changes."""

_HEADER = 72
"""The bytes of a delta file before its body (docs/format.md)."""

_SIDE = 4096
_DENSITY = 0.0108
"""The share of bf16 weights that a synthetic update changes, as in the recorded trace."""


@dataclass
class _Sum:
    """Totals over all updates with one recipe."""

    weights: int = 0
    changed: int = 0
    scales: int = 0
    scales_changed: int = 0
    state_bytes: int = 0
    files: int = 0
    delta: int = 0
    bound: float = 0.0
    peers: list[int] = field(default_factory=lambda: [0] * len(_PEERS))
    newest: State = field(default_factory=dict)

    @property
    def over_bound(self) -> float:
        """The size of all files as a multiple of the order-0 bound."""
        return 8 * self.delta / max(self.bound, 1)

    def row(self, name: str) -> list[str]:
        """Return the numbers of the table."""
        changed = max(self.changed, 1)
        full = 8 * self.state_bytes
        return [
            name,
            f"{self.changed / self.weights:.4%}",
            f"{self.scales_changed / self.scales:.4%}",
            f"{8 * self.delta / changed:.2f}",
            f"{self.over_bound:.3f}",
            f"{full / (8 * self.delta):,.0f}×",
            *(f"{size / self.delta:.2f}×" for size in self.peers),
            f"{8 * (self.delta - _HEADER * self.files) / max(self.bound, 1):.3f}",
        ]


def measure(trace: Path | None) -> list[Table]:
    """Measure recorded updates with every recipe; synthetic ones if there is no trace."""
    source = f"{trace.name}, the linear layers, all steps" if trace else f"synthetic, {_title(_SIDE**2)}"
    table, errors = _table("quantised-size", source), _table_of_errors(source)
    newest, widest = _newest_masters(trace), []
    for name in RECIPES:
        totals: dict[str, _Sum] = {}
        for kind in KINDS:
            recipe = _recipe(name, kind)
            updates = _recorded(trace, recipe) if trace else _synthetic(_SIDE**2, [recipe])[recipe]
            totals[kind] = _measured(updates, recipe)
            table.rows.append(totals[kind].row(f"{name}, {kind}"))
        _check(table, Recipe.of(name), totals)
        widest.append(_add_error(errors, Recipe.of(name), totals, newest))
    table.notes.append(f"Each file has a header of {_HEADER} bytes, which is 5% to 7% of a recorded update with 4-bit codes.")
    errors.check("no scale is more than twice as wide as a fresh one", max(widest) <= 2)
    return [table, errors]


def measure_large(weights: int) -> Table:
    """Measure one synthetic update of this many weights. Headers and tables hardly count at this size."""
    table = _table("quantised-size-large", f"synthetic, {_title(weights)}")
    for names in LARGE:
        totals: dict[str, dict[str, _Sum]] = {name: {} for name in names}
        for kind in KINDS:
            recipes = {name: _recipe(name, kind) for name in names}
            updates = _synthetic(weights, list(recipes.values()))
            for name, recipe in recipes.items():
                total = _measured(updates.pop(recipe), recipe)
                total.newest = {}  # so that the memory is free
                totals[name][kind] = total
        for name, found in totals.items():
            table.rows += [found[kind].row(f"{name}, {kind}") for kind in KINDS]
            _check(table, Recipe.of(name), found)
    return table


def _recipe(name: str, kind: str) -> Recipe:
    return replace(Recipe.of(name), sticky=kind == "sticky")


def _check(table: Table, recipe: Recipe, totals: dict[str, _Sum]) -> None:
    limit = 1.06 if recipe.element == "e4m3" else 1.12
    found = ", ".join(f"{kind} {total.over_bound:.3f}" for kind, total in totals.items())
    table.check(
        f"{recipe.spelling}: at most {limit} × the order-0 bound ({found})", all(total.over_bound <= limit for total in totals.values())
    )


def _table_of_errors(source: str) -> Table:
    table = Table(
        "quantisation-error",
        f"Scales that stay and fresh ones: {source}",
        ["recipe", "codes changed, fresh", "sticky", "scales changed, fresh", "sticky", "error, fresh", "sticky", "widest scale, × fresh"],
    )
    table.notes.append("Changes are the mean of all steps. The error is the relative error (`quantisation_error`) after the last step.")
    return table


def _add_error(table: Table, recipe: Recipe, totals: dict[str, _Sum], masters: State) -> float:
    """Add a row, and return how wide the widest scale is, as a multiple of a fresh one."""
    sticky, fresh = totals["sticky"], totals["fresh"]
    found = quantisation_error(QuantisedLayout.of_state(recipe, masters), masters, sticky.newest)
    table.rows.append(
        [
            f"`{recipe.spelling}`",
            *(f"{total.changed / total.weights:.4%}" for total in (fresh, sticky)),
            *(f"{total.scales_changed / total.scales:.3%}" for total in (fresh, sticky)),
            f"{found.fresh_relative_error:.3%}",
            f"{found.relative_error:.3%}",
            f"{found.widest:.2f}",
        ]
    )
    return found.widest


def _table(name: str, source: str) -> Table:
    table = Table(
        name,
        f"Quantised updates: {source}",
        ["recipe", "weights changed", "scales changed", "bits per change", "× order-0 bound", "smaller than the full state"]
        + [f"{peer.name} is larger by" for peer in _PEERS]
        + ["× order-0 bound, without headers"],
    )
    table.notes.append(
        "The order-0 bound is H(position | old exponent or 4-bit code) + H(step | the same), by tensor, and 40 bits for each changed scale."
    )
    table.notes.append("The peers' methods are re-implemented (benchmarks/peers.py), and get the same quantised bytes.")
    return table


def _title(weights: int) -> str:
    return f"{weights / 2**30:.3g} Gi weights, of which {_DENSITY:.2%} change in bf16"


def _measured(updates: Iterable[tuple[State, State]], recipe: Recipe) -> _Sum:
    total = _Sum()
    for old, new in updates:
        delta = deltawire.encode_delta(old, new)
        total.delta += len(delta)
        total.files += 1
        for name in new:
            _add(total, recipe, name, old[name], new[name])
        deltawire.apply_delta(old, delta)
        assert all(np.array_equal(_flat(old[name]), _flat(new[name])) for name in new), "not exact"
        total.newest = new
    return total


def _add(total: _Sum, recipe: Recipe, name: str, old: Array, new: Array) -> None:
    """Count what changes in one tensor. It must not have been patched yet."""
    before, after = _flat(old), _flat(new)
    total.state_bytes += before.nbytes
    for index, peer in enumerate(_PEERS):
        total.peers[index] += len(peer.encode(before, after))
    if not name.endswith(("weight", "weight_packed")):
        changed = int(np.count_nonzero(old.reshape(-1) != new.reshape(-1)))
        total.scales += old.size
        total.scales_changed += changed
        total.bound += _BITS_OF_A_SCALE * changed
        return
    if recipe.element != "e4m3":
        before, after = codes_of(before), codes_of(after)
    total.weights += before.size
    total.changed += int(np.count_nonzero(before != after))
    total.bound += code_bound_bits(before, after, recipe.element)


def _flat(tensor: Array) -> Array:
    return tensor.reshape(-1).view(np.uint8)


def _recorded(trace: Path, recipe: Recipe) -> Iterator[tuple[State, State]]:
    previous: State | None = None
    for base, new in trace_steps(trace):
        if previous is None:
            previous = _quantised(_linear(base), recipe, None)
        state = _quantised(_linear(new), recipe, previous)
        yield {name: tensor.copy() for name, tensor in previous.items()}, state
        previous = state


def _linear(state: State) -> State:
    return {name: tensor for name, tensor in state.items() if "_proj" in name}


def _newest_masters(trace: Path | None) -> State:
    """Return the weights after the last step that `measure` measures."""
    if trace is None:
        return list(_steps_of_matrix(0))[-1]
    *_, (_, newest) = trace_steps(trace)
    return _linear(newest)


def _synthetic(weights: int, recipes: Sequence[Recipe]) -> dict[Recipe, list[tuple[State, State]]]:
    """Return the second update of many square matrices for each recipe.

    The first update after fresh scales is left out, because it is not typical: the largest weight of each int4 group starts between two
    codes. The matrices are made one by one, because the float32 weights take four times the memory.
    """
    states: dict[Recipe, tuple[State, State]] = {recipe: ({}, {}) for recipe in recipes}
    for number in range(max(weights // _SIDE**2, 1)):
        last: dict[Recipe, State | None] = dict.fromkeys(recipes)
        for step, masters in enumerate(_steps_of_matrix(number)):
            for recipe in recipes:
                made = _quantised(masters, recipe, last[recipe])
                last[recipe] = made
                if step:
                    states[recipe][step - 1].update(made)
    return {recipe: [update] for recipe, update in states.items()}


def _steps_of_matrix(number: int) -> Iterator[State]:
    """Yield a matrix before and after each of two updates, rounded to bf16 as in the recorded updates."""
    for masters in synthetic_masters(_SIDE**2, update_size(_DENSITY, BF16), 2, seed=number):
        yield {f"model.layers.{number}.mlp.down_proj.weight": masters.astype(BF16).reshape(_SIDE, _SIDE)}


def _quantised(state: State, recipe: Recipe, previous: State | None) -> State:
    made = quantise_state(state, recipe, previous)
    assert made.keys() == QuantisedLayout.of_state(recipe, state).outputs.keys()
    return {name: np.asarray(tensor) for name, tensor in made.items()}
