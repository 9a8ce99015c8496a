"""Weights of all experts of a layer in one tensor of three dimensions, as transformers holds them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ..errors import UnquantisableWeight

_GATE_UP, _DOWN = ".experts.gate_up_proj", ".experts.down_proj"


def is_fused(name: str) -> bool:
    """Tell whether a tensor with this name holds the weights of all experts of a layer."""
    return name.endswith((_GATE_UP, _DOWN))


def has_biases(name: str, specs: Mapping[str, Any]) -> bool:
    """Tell whether a tensor holds experts in the form of gpt-oss: they have biases, and gate and up are interleaved."""
    return is_fused(name) and f"{name}_bias" in specs


class FusedExperts(NamedTuple):
    """How the weights of the experts lie in a tensor of three dimensions."""

    name: str
    experts: int
    rows: int
    """The rows of one expert: gate and up together."""
    columns: int
    is_transposed: bool
    """Whether the tensor holds the transposes of the weights: experts, inputs, outputs."""

    @classmethod
    def of(cls, name: str, specs: Mapping[str, tuple[Any, tuple[int, ...]]]) -> FusedExperts:
        """Return how the weights lie in the tensor `name`. The shapes of gate_up_proj and down_proj together tell which axis is which."""
        base = name.removesuffix(_GATE_UP).removesuffix(_DOWN)
        both = [specs[other][1] if (other := base + suffix) in specs else () for suffix in (_GATE_UP, _DOWN)]
        gate_up, down = both
        if len(gate_up) == len(down) == 3 and gate_up[0] == down[0]:
            for is_transposed in (False, True):
                axes = (0, 2, 1) if is_transposed else (0, 1, 2)
                (_, twice, hidden), (_, outputs, inner) = ([shape[axis] for axis in axes] for shape in (gate_up, down))
                if hidden == outputs and twice == 2 * inner:
                    experts, rows, columns = (specs[name][1][axis] for axis in axes)
                    return cls(name, experts, rows, columns, is_transposed)
        raise UnquantisableWeight(
            f"the shapes of {base + _GATE_UP!r} and {base + _DOWN!r}, {gate_up or None} and {down or None}, do not tell where the "
            "weights of the experts lie."
        )

    def parts(self) -> Iterator[tuple[str, int, int]]:
        """Yield the name of the module, the first row and the number of rows of each weight of each expert, as in usual checkpoints."""
        parent = self.name.rpartition(".")[0]
        kinds = ("gate_proj", "up_proj") if self.name.endswith(_GATE_UP) else ("down_proj",)
        each = self.rows // len(kinds)
        for expert in range(self.experts):
            for number, kind in enumerate(kinds):
                yield f"{parent}.{expert}.{kind}", expert * self.rows + number * each, each
