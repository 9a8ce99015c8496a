from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .codec.base import Lanes
from .codec.bits import Bits, HostBits

# Functions that take `Bits` raise `TypeError` for bits on a GPU. Columns of arrays are lists or tuples, because those are read fastest.

_Type: TypeAlias = tuple[int, int, int, int, int]

class Addresses:
    """Contiguous tensors in columns. Their memory stays valid as long as `owner` lives."""

    def __init__(self, addresses: NDArray[np.uint64], counts: NDArray[np.int64], itemsizes: NDArray[np.uint8], owner: object) -> None: ...

_Arrays: TypeAlias = list[Bits] | tuple[Bits, ...] | Addresses
_Bases: TypeAlias = list[Bits | None] | tuple[Bits | None, ...] | list[Bits] | Addresses

EncodeGroup: TypeAlias = tuple[_Type, _Bases, _Arrays, NDArray[np.uint64]]
ResolveGroup: TypeAlias = tuple[_Type, _Bases, NDArray[np.int64], NDArray[np.uint64], NDArray[np.uint8] | None, NDArray[np.bool_]]
Outcome: TypeAlias = tuple[NDArray[np.int64], Lanes, Lanes]

class Corrupt(Exception): ...
class WrongType(Exception): ...
class WrongCount(Exception): ...

def instruction_sets() -> list[str]: ...

class Preparation:
    """Makes tensors right before they are encoded."""

def encode_groups(
    groups: Sequence[EncodeGroup], threads: int, isa: str, preparation: Preparation | None = None
) -> list[tuple[list[NDArray[np.uint8]], NDArray[np.int64], Lanes, Lanes]]: ...
def digest(arrays: _Arrays, seeds: NDArray[np.uint64], threads: int, isa: str) -> NDArray[np.uint32]: ...
def memory_of(arrays: list[NDArray[Any]]) -> tuple[NDArray[np.uint64], NDArray[np.uint8]]: ...
def reaching(arrays: _Arrays, masks: NDArray[np.uint64], limits: NDArray[np.uint64], threads: int) -> NDArray[np.uint8]: ...
def copy(source: _Arrays, target: _Arrays, threads: int) -> None: ...
def join(pieces: Sequence[NDArray[np.uint8]], threads: int) -> bytes: ...
def write_elements(array: HostBits, indices: NDArray[np.int64], values: NDArray[np.uint8]) -> None: ...
def inspect(payload: NDArray[np.uint8], type: _Type, old: bool) -> tuple[NDArray[np.int64], list[int], list[int]]: ...
def bytes_done() -> int: ...
def find_chunks(payload: NDArray[np.uint8]) -> NDArray[np.int64]: ...

class Resolution:
    def __init__(self, threads: int, budget: int, defer: bool, isa: str) -> None: ...
    def add(self, groups: Sequence[ResolveGroup], old: bool) -> list[Outcome]: ...
    def extract(self, tensors: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.uint8], list[int], list[int], list[int]]: ...
    def extract_dense(self, tensors: NDArray[np.int64], arrays: list[HostBits]) -> None: ...
    def exchange(self) -> None: ...
    def compact(self) -> None: ...
    def settle(self) -> None: ...
    def revert(self) -> None: ...

# Quantising (native/quantise.hpp). Addresses are those of arrays that the caller keeps alive.
def quantise(
    kind: int,
    group: int,
    data: NDArray[np.uint64],
    strides: NDArray[np.int64],
    rows: NDArray[np.int64],
    columns: NDArray[np.int64],
    sources: NDArray[np.uint8],
    codes: NDArray[np.uint64],
    scales: NDArray[np.uint64],
    globals: NDArray[np.uint64],
    previous: NDArray[np.uint64],
    previous_globals: NDArray[np.uint64],
    groups: NDArray[np.int64],
    threads: int,
    isa: str,
) -> int | None: ...

class ExactArithmetic:
    """Rounds to nearest and keeps subnormal numbers, on the thread that enters it."""

    def __init__(self) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...

class Quantisation(Preparation):
    def __init__(
        self,
        kind: int,
        group: int,
        data: NDArray[np.uint64],
        strides: NDArray[np.int64],
        rows: NDArray[np.int64],
        columns: NDArray[np.int64],
        sources: NDArray[np.uint8],
        codes: NDArray[np.uint64],
        scales: NDArray[np.uint64],
        globals: NDArray[np.uint64],
        previous: NDArray[np.uint64],
        previous_globals: NDArray[np.uint64],
        groups: NDArray[np.int64],
        keeps_codes: bool,
        isa: str,
    ) -> None: ...
    def finish(self, threads: int) -> None: ...
    def first_nonfinite(self) -> int | None: ...

def block_maxima(
    kind: int,
    group: int,
    address: int,
    stride: int,
    rows: int,
    columns: int,
    source: int,
    first_row: int,
    out: NDArray[np.float32],
    threads: int,
    isa: str,
) -> None: ...
def encode_codes(
    kind: int,
    group: int,
    address: int,
    stride: int,
    rows: int,
    columns: int,
    source: int,
    first_row: int,
    divisors: NDArray[np.float32],
    codes: NDArray[np.uint8],
    threads: int,
    isa: str,
) -> None: ...

# Routed experts (native/routing.hpp).
def decode_routing(
    layers: int,
    top_k: int,
    experts: int,
    copied: NDArray[np.int64],
    reference: NDArray[np.int64],
    recorded: NDArray[np.uint8],
    order: NDArray[np.uint16],
    lengths: NDArray[np.uint8],
    ends: NDArray[np.uint64],
    data: NDArray[np.uint8],
    out: NDArray[np.int16],
    threads: int,
    isa: str,
) -> None: ...
def encode_routing(
    layers: int,
    top_k: int,
    experts: int,
    copied: NDArray[np.int64],
    reference: NDArray[np.int64],
    recorded: NDArray[np.uint8],
    order: NDArray[np.uint16],
    ids: NDArray[np.int16],
    choose: Callable[[list[int]], list[int]],
) -> tuple[bytes, list[bytes]]: ...
