"""Compare bits per changed weight of quantised updates with peers and the order-0 bound. Sizes include headers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from peers import DenseXor, GapXor, Int32Value, Peer
from report import Table
from workloads import BF16, Array, State, code_bound_bits, synthetic_masters, trace_steps, update_size

import deltawire
from deltawire.quantise import Recipe
from deltawire.quantise.layout import QuantisedLayout
from deltawire.quantise.quantise import quantise_state

RECIPES = ("fp8-block", "fp8-block-ue8m0", "fp8-channel", "fp8-tensor", "nvfp4", "mxfp4", "int4", "int4-128")
LARGE = ("fp8-block", "nvfp4", "mxfp4", "int4", "int4-128")
_PEERS: tuple[Peer, ...] = (DenseXor(), GapXor(), Int32Value())
_BITS_OF_A_SCALE = 40
"""The bits that the order-0 bound counts for each scale that changes."""

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
    delta: int = 0
    bound: float = 0.0
    peers: list[int] = field(default_factory=lambda: [0] * len(_PEERS))

    def row(self, name: str) -> list[str]:
        """Return the numbers of the table."""
        changed = max(self.changed, 1)
        full = 8 * self.state_bytes
        return [
            name,
            f"{self.changed / self.weights:.4%}",
            f"{self.scales_changed / self.scales:.4%}",
            f"{8 * self.delta / changed:.2f}",
            f"{8 * self.delta / max(self.bound, 1):.3f}",
            f"{full / (8 * self.delta):,.0f}×",
            *(f"{size / self.delta:.2f}×" for size in self.peers),
        ]


def measure(trace: Path | None) -> Table:
    """Measure recorded updates with every recipe; synthetic ones if there is no trace."""
    source = f"{trace.name}, the linear layers, all steps" if trace else f"synthetic, {_title(_SIDE**2)}"
    table = _table("quantised-size", source)
    for name in RECIPES:
        for sticky in (True, False):
            recipe = replace(Recipe.of(name), sticky=sticky)
            updates = _recorded(trace, recipe) if trace else _synthetic(_SIDE**2, [recipe])[recipe.spelling]
            table.rows.append(_measured(updates, recipe).row(f"{name}, {'sticky' if sticky else 'fresh'}"))
    table.notes.append("Each file has a header of 72 bytes, which is 5% to 7% of a recorded update with 4-bit codes.")
    return table


def measure_large(weights: int) -> Table:
    """Measure one synthetic update of this many weights, with sticky scales. Headers and tables hardly count at this size."""
    table = _table("quantised-size-large", f"synthetic, {_title(weights)}, sticky scales")
    recipes = [Recipe.of(name) for name in LARGE]
    updates = _synthetic(weights, recipes)
    for recipe in recipes:
        total = _measured(updates.pop(recipe.spelling), recipe)
        table.rows.append(total.row(recipe.spelling))
        limit = 1.06 if recipe.element == "e4m3" else 1.12
        table.check(f"{recipe.spelling}: at most {limit} × the order-0 bound", 8 * total.delta <= limit * total.bound)
    return table


def _table(name: str, source: str) -> Table:
    table = Table(
        name,
        f"Quantised updates: {source}",
        ["recipe", "weights changed", "scales changed", "bits per change", "× order-0 bound", "smaller than the full state"]
        + [f"{peer.name} is larger by" for peer in _PEERS],
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
        for name in new:
            _add(total, recipe, name, old[name], new[name])
        deltawire.apply_delta(old, delta)
        assert all(np.array_equal(_flat(old[name]), _flat(new[name])) for name in new), "not exact"
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
        before, after = _codes(before), _codes(after)
    total.weights += before.size
    total.changed += int(np.count_nonzero(before != after))
    total.bound += code_bound_bits(before, after, recipe.element)


def _flat(tensor: Array) -> Array:
    return tensor.reshape(-1).view(np.uint8)


def _codes(packed: Array) -> Array:
    """Return the 4-bit codes of packed bytes, the low half of each byte first."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(-1)


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


def _synthetic(weights: int, recipes: Sequence[Recipe]) -> dict[str, list[tuple[State, State]]]:
    """Return the second update of many square matrices for each recipe.

    The weights are rounded to bf16 before they are quantised, as in the recorded updates. The first update after fresh scales is left out,
    because it is not typical: the largest weight of each int4 group starts between two codes. The matrices are made one by one, because
    the float32 weights take four times the memory.
    """
    states: dict[str, tuple[State, State]] = {recipe.spelling: ({}, {}) for recipe in recipes}
    for number in range(max(weights // _SIDE**2, 1)):
        name = f"model.layers.{number}.mlp.down_proj.weight"
        last: dict[str, State | None] = {recipe.spelling: None for recipe in recipes}
        for step, masters in enumerate(synthetic_masters(_SIDE**2, update_size(_DENSITY, BF16), 2, seed=number)):
            weights_of_step = masters.astype(BF16)
            for recipe in recipes:
                made = _quantised({name: weights_of_step.reshape(_SIDE, _SIDE)}, recipe, last[recipe.spelling])
                last[recipe.spelling] = made
                if step:
                    states[recipe.spelling][step - 1].update(made)
    return {spelling: [update] for spelling, update in states.items()}


def _quantised(state: State, recipe: Recipe, previous: State | None) -> State:
    made = quantise_state(state, recipe, previous)
    assert made.keys() == QuantisedLayout.of_state(recipe, state).outputs.keys()
    return {name: np.asarray(tensor) for name, tensor in made.items()}
