"""Routed experts in a file of rollouts: which experts processed each token of each completion (docs/protocol.md §10)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..codec.routing import CODE_BITS, GROUP, MOST_EXPERTS, MOST_LAYERS, MOST_TOP_K, CodedRows, RoutingRows, decode_rows, encode_rows
from ..errors import CorruptRollouts
from .records.canonical import Fields
from .safetensors_header import MalformedHeader

MISSING = -1
"""The id in rows that were not recorded."""

ROUTING_DTYPES = {
    "routing_ends": "I64",
    "routing_shared": "I32",
    "routing_runs": "I32",
    "routing_order": "U8",
    "routing_codes": "U8",
    "routing_data": "U8",
}
MOST_TOKENS = 1 << 22
"""The most tokens that routing may have in one file. A prompt counts once for each of its completions."""
_IDS_PER_BYTE = 128
"""A file may hold this many ids for each of its bytes. Files of real models stay below, even if most rows are missing."""
_FACTS = 1 << 14
"""The facts and the header take fewer bytes than this."""
_SORTED_FROM = 12
"""Rows with more experts than this are sorted, to find those that are named twice."""
_SMALL = 1 << 16
"""Fewer ids than this are coded with and without an order of the experts, and the shorter form is taken. One thread decodes them."""


@dataclass(frozen=True, slots=True)
class RoutingLayout:
    """The routers of a model.

    Parameters
    ----------
    experts
        The number of experts in a layer.
    top_k
        The number of experts that each token goes to.
    layers
        The numbers of the decoder layers that have experts, rising.
    """

    experts: int
    top_k: int
    layers: tuple[int, ...]

    def why_unusable(self) -> str | None:
        """Return why no file can have this layout, or None if one can."""
        if not 1 <= self.experts <= MOST_EXPERTS or not 1 <= self.top_k <= min(self.experts, MOST_TOP_K):
            return (
                f"{self.experts:,} experts, of which each token goes to {self.top_k:,}; "
                f"at most {MOST_EXPERTS:,} and {MOST_TOP_K} are allowed"
            )
        if not 1 <= len(self.layers) <= MOST_LAYERS or self.layers[0] < 0 or self.layers[-1] >= 1 << 16:
            return f"{len(self.layers):,} layers with experts; 1 to {MOST_LAYERS:,} are allowed"
        if any(one >= other for one, other in zip(self.layers, self.layers[1:], strict=False)):
            return "layers that are not in ascending order"
        return None


@dataclass(frozen=True, slots=True, eq=False)
class RecordedExperts:
    """The experts that processed the tokens of one completion, as an engine recorded them.

    Parameters
    ----------
    layout
        The routers of the model.
    experts
        The experts as integers [tokens, layers with experts, top k], −1 where nothing was recorded. The tokens are those of the prompt and
        then those of the completion.
    """

    layout: RoutingLayout
    experts: NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """The tokens that a model processes for each completion: those of the prompt, and then its own.

    Parameters
    ----------
    tokens
        The token ids of all sequences, one after the other.
    starts
        Where each sequence begins in `tokens`, and then the number of all tokens.
    prompts
        The index of the prompt of each sequence.
    """

    tokens: NDArray[np.int32]
    starts: NDArray[np.int64]
    prompts: tuple[int, ...]

    @classmethod
    def of(cls, prompts: Sequence[NDArray[np.int32]], completions: Sequence[tuple[int, NDArray[np.int32]]]) -> Sequences:
        """Return the sequences of completions, each with the index of its prompt. Raises `CorruptRollouts` if they are too long.

        Parameters
        ----------
        prompts
            The token ids of each prompt.
        completions
            For each completion, the index of its prompt and its own token ids.
        """
        starts = np.cumsum([0, *(len(prompts[prompt]) + len(tokens) for prompt, tokens in completions)], dtype=np.int64)
        if starts[-1] > MOST_TOKENS:
            raise CorruptRollouts(f"routing of {starts[-1]:,} tokens is more than the {MOST_TOKENS:,} that one file may hold.")
        parts = [part for prompt, tokens in completions for part in (prompts[prompt], tokens)]
        return cls(np.concatenate(parts), starts, tuple(prompt for prompt, _ in completions))

    def pairs(self) -> Iterator[tuple[slice, slice | None]]:
        """Yield the index of each sequence, and that of the sequence before it of the same prompt."""
        before: dict[int, slice] = {}
        for number, prompt in enumerate(self.prompts):
            own = slice(int(self.starts[number]), int(self.starts[number + 1]))
            yield own, before.get(prompt)
            before[prompt] = own


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """The routed experts of all completions of a file, in the form in which the file holds them. `experts` decodes them.

    Parameters
    ----------
    layout
        The routers of the model.
    broken
        The number of rows that a member dropped, because they named an expert twice.
    arrays
        The tensors of the file.
    sequences
        The tokens of the file.
    """

    layout: RoutingLayout
    broken: int
    arrays: Mapping[str, NDArray[Any]]
    sequences: Sequences
    _decoded: list[list[NDArray[np.int16]]] = field(default_factory=list, repr=False)

    @classmethod
    def encode(cls, layout: RoutingLayout, sequences: Sequences, experts: Sequence[NDArray[Any] | None]) -> Routing:
        """Return routed experts in the form of a file. Rows that name an expert twice are dropped and counted. Raises `ValueError`.

        Parameters
        ----------
        layout
            The routers of the model.
        sequences
            The tokens of the file.
        experts
            For each completion the experts by token, layer and position, −1 where nothing was recorded; None if nothing was.
        """
        if (why := layout.why_unusable()) is not None:
            raise ValueError(f"the routers have {why}")
        cleaned = [_cleaned(layout, int(tokens), each) for tokens, each in zip(np.diff(sequences.starts), experts, strict=True)]
        whole = np.concatenate([each for each, _ in cleaned])
        recorded = (whole[..., 0] >= 0).astype(np.uint8)
        shared = _shared(whole, sequences)
        copied, reference = _copied(shared, sequences), _references(sequences.tokens)
        runs = _runs(recorded[copied < 0].ravel())
        rows = RoutingRows(layout.experts, layout.top_k, copied, reference, recorded, _by_use(layout, whole, copied))
        coded, order = encode_rows(rows, whole), _order_bytes(rows)
        if whole.size < _SMALL:
            plain = RoutingRows(layout.experts, layout.top_k, copied, reference, recorded, _no_order(layout))
            other = encode_rows(plain, whole)
            if len(other.data) < len(coded.data) + order.size:
                coded, order = other, np.zeros(0, np.uint8)
        arrays = {
            "routing_ends": coded.ends.astype("<i8"),
            "routing_shared": shared.astype("<i4"),
            "routing_runs": runs.astype("<i4"),
            "routing_order": order,
            "routing_codes": _packed(coded.lengths),
            "routing_data": coded.data,
        }
        return cls(layout, sum(broken for _, broken in cleaned), arrays, sequences)

    @property
    def nbytes(self) -> int:
        """The bytes that it takes in a file."""
        return sum(array.nbytes for array in self.arrays.values())

    @property
    def ids(self) -> int:
        """The number of expert ids, with missing ones."""
        return len(self.sequences.tokens) * len(self.layout.layers) * self.layout.top_k

    def experts(self, *, threads: int = 2) -> list[NDArray[np.int16]]:
        """Return the experts of each completion by token, layer and position, ascending within a row; −1 where nothing was recorded.

        The first tokens are those of the prompt. Raises `CorruptRollouts`.

        Parameters
        ----------
        threads
            The most threads that decode. Small files are decoded by one.
        """
        layout, arrays = self.layout, self.arrays
        layers = len(layout.layers)
        shared = arrays["routing_shared"]
        copied, reference = _copied(shared, self.sequences), _references(self.sequences.tokens)
        recorded = _recorded(arrays["routing_runs"], copied, layers)
        wide = np.uint8 if layout.experts <= 256 else np.dtype("<u2")
        order = arrays["routing_order"].view(wide).astype(np.uint16).reshape(-1, layout.experts)
        rows = RoutingRows(layout.experts, layout.top_k, copied, reference, recorded, order if order.size else _no_order(layout))
        coded = CodedRows(
            _unpacked(arrays["routing_codes"], sum(rows.alphabets)), arrays["routing_ends"].astype(np.uint64), arrays["routing_data"]
        )
        whole = decode_rows(rows, coded, threads=threads if self.ids >= _SMALL else 1)
        return np.split(whole, self.sequences.starts[1:-1])

    def of_completion(self, number: int) -> NDArray[np.int16]:
        """Return the experts of one completion. Those of all completions are decoded at the first call, and kept.

        Parameters
        ----------
        number
            The index of the completion.
        """
        if not self._decoded:
            self._decoded.append(self.experts())
        return self._decoded[0][number]

    def plain(self) -> dict[str, Any]:
        """Return it as the field of a record."""
        layout = self.layout
        return {"experts": layout.experts, "top_k": layout.top_k, "layers": list(layout.layers), "broken": self.broken}

    @classmethod
    def read(
        cls,
        facts: Fields,
        arrays: Mapping[str, NDArray[Any]],
        sequences: Sequences,
        *,
        most_ids: int,
        file_bytes: int,
    ) -> Routing:
        """Return the routed experts of a file. Everything is checked, and nothing is allocated for more ids than allowed.

        Raises `MalformedHeader`, `CorruptRecord` and `CorruptRollouts`.
        """
        layers = facts.items("layers")
        if any(type(layer) is not int for layer in layers) or len(layers) > MOST_LAYERS:
            facts.refuse("its layers are not a list of numbers")
        layout = RoutingLayout(facts.integer("experts"), facts.integer("top_k"), tuple(layers))
        broken = facts.integer("broken")
        facts.done()
        if (why := layout.why_unusable()) is not None:
            raise MalformedHeader(f"its routing has {why}.")
        found = cls(layout, broken, {name: arrays[name] for name in ROUTING_DTYPES}, sequences)
        if found.ids > min(most_ids, _IDS_PER_BYTE * file_bytes):
            raise MalformedHeader(f"its routing has {found.ids:,} ids; {min(most_ids, _IDS_PER_BYTE * file_bytes):,} are allowed.")
        if broken > found.ids // layout.top_k:
            raise MalformedHeader("its routing dropped more rows than it has.")
        found._check_shapes()
        found.experts()
        return found

    def _check_shapes(self) -> None:
        layout, arrays = self.layout, self.arrays
        wide = 1 if layout.experts <= 256 else 2
        empty = np.zeros(0, np.int64)
        rows = RoutingRows(layout.experts, layout.top_k, empty, empty, np.zeros((0, len(layout.layers)), np.uint8), _no_order(layout))
        shapes = {
            "routing_ends": (rows.streams,),
            "routing_shared": (len(self.sequences.prompts),),
            "routing_runs": (arrays["routing_runs"].size,),
            "routing_order": (0,) if arrays["routing_order"].size == 0 else (len(layout.layers) * layout.experts * wide,),
            "routing_codes": ((sum(rows.alphabets) + 1) // 2,),
            "routing_data": (arrays["routing_data"].size,),
        }
        for name, shape in shapes.items():
            if arrays[name].shape != shape:
                raise MalformedHeader(f"{name} has the shape {list(arrays[name].shape)} instead of {list(shape)}.")
        if int(arrays["routing_ends"].min()) < 0:
            raise MalformedHeader("routing_ends are below 0.")
        order = arrays["routing_order"].view("u1" if wide == 1 else "<u2").reshape(-1, layout.experts)
        if not bool((np.sort(order, axis=1) == np.arange(layout.experts)).all()):
            raise MalformedHeader("routing_order does not hold every expert of a layer once.")
        _check_shared(arrays["routing_shared"], self.sequences)


def most_routing_bytes(layout: RoutingLayout, tokens: int, completions: int) -> int:
    """Return the most bytes that the routing of a file can take.

    Parameters
    ----------
    layout
        The routers of the model.
    tokens
        The number of tokens of all sequences. A prompt counts once for each of its completions.
    completions
        The number of completions.
    """
    masks, layers = (layout.top_k + 7) // 8, len(layout.layers)
    row = (layout.top_k + masks) * CODE_BITS / 8 + 4  # codes, and a run of its own
    tables = layers * layout.experts * 2 + 256 * masks + layout.experts * layout.top_k
    streams = (layers + GROUP) // GROUP * (layout.top_k + masks) * 9
    return int(tokens * layers * row) + tables + streams + 4 * completions + _FACTS


def _cleaned(layout: RoutingLayout, tokens: int, experts: NDArray[Any] | None) -> tuple[NDArray[np.int16], int]:
    """Return rows in which every row is whole or missing, and the number of rows that were dropped because they are broken."""
    shape = (tokens, len(layout.layers), layout.top_k)
    if experts is None:
        return np.full(shape, MISSING, np.int16), 0
    found = np.asarray(experts)
    if found.shape != shape or found.dtype.kind not in "iu":
        raise ValueError(
            f"routed experts have the shape {list(found.shape)} and type {found.dtype} instead of integers of the shape {list(shape)}"
        )
    if found.size and (int(found.min()) < MISSING or int(found.max()) >= layout.experts):
        raise ValueError(f"routed experts name {int(found.min())} to {int(found.max())}, but there are {layout.experts:,} experts")
    found = found.astype(np.int16)
    bad = broken_rows(found)
    if bad.any():
        found[bad] = MISSING
    return found, int(bad.sum())


def broken_rows(experts: NDArray[Any]) -> NDArray[np.bool_]:
    """Tell for each row whether it names an expert twice, or is recorded only in part. No router does that, but engines have such faults.

    Rows that are all −1 are missing, and not broken. A row of zeros names expert 0 several times, if tokens go to several experts.

    Parameters
    ----------
    experts
        The experts; those of a row are along the last axis.
    """
    columns = np.ascontiguousarray(np.moveaxis(experts, -1, 0))  # comparing columns takes a third of the time of sorting rows
    if len(columns) > _SORTED_FROM:
        columns = np.sort(columns, axis=0)
    twice = np.zeros(columns.shape[1:], np.bool_)
    for first in range(len(columns) - 1):
        for second in range(first + 1, first + 2 if len(columns) > _SORTED_FROM else len(columns)):
            twice |= columns[first] == columns[second]
    return np.asarray((twice | (columns.min(axis=0) < 0)) & (columns.max(axis=0) >= 0))


def _shared(whole: NDArray[np.int16], sequences: Sequences) -> NDArray[np.int64]:
    """Return how many first tokens of each completion have the rows of the completion before it of the same prompt."""
    shared = np.zeros(len(sequences.prompts), np.int64)
    for number, (own, last) in enumerate(sequences.pairs()):
        if last is not None:
            most = min(own.stop - own.start, last.stop - last.start)
            here, there = slice(own.start, own.start + most), slice(last.start, last.start + most)
            equal = (sequences.tokens[here] == sequences.tokens[there]) & (whole[here] == whole[there]).all((1, 2))
            shared[number] = most if equal.all() else int(equal.argmin())
    return shared


def _check_shared(shared: NDArray[np.int32], sequences: Sequences) -> None:
    for count, (own, last) in zip(shared.tolist(), sequences.pairs(), strict=True):
        most = 0 if last is None else min(own.stop - own.start, last.stop - last.start)
        tokens, before = (sequences.tokens[one.start : one.start + max(count, 0)] for one in (own, last or own))
        if not 0 <= count <= most or not np.array_equal(tokens, before):
            raise MalformedHeader("routing_shared names tokens that are not those of the completion before.")


def _copied(shared: NDArray[Any], sequences: Sequences) -> NDArray[np.int64]:
    copied = np.full(len(sequences.tokens), -1, np.int64)
    for count, (own, last) in zip(shared.tolist(), sequences.pairs(), strict=True):
        if last is not None:
            copied[own.start : own.start + count] = np.arange(count) + last.start
    return copied


def _references(tokens: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return the last earlier token with the same id, for each token of all sequences."""
    keys = (tokens.astype(np.int64) << 32) + np.arange(len(tokens))
    keys.sort()  # it takes a fifth of the time of a stable argsort
    order, ids = keys & 0xFFFFFFFF, keys >> 32
    reference = np.full(len(tokens), -1, np.int64)
    same = ids[1:] == ids[:-1]
    reference[order[1:][same]] = order[:-1][same]
    return reference


def _by_use(layout: RoutingLayout, whole: NDArray[np.int16], copied: NDArray[np.int64]) -> NDArray[np.uint16]:
    """Return the experts of each layer, the most used one first."""
    coded = whole[copied < 0]
    ordered = np.empty((len(layout.layers), layout.experts), np.uint16)
    for layer in range(len(layout.layers)):
        ids = coded[:, layer].ravel()
        counts = np.bincount(ids[ids >= 0], minlength=layout.experts)
        ordered[layer] = np.argsort(-counts, kind="stable")
    return ordered


def _no_order(layout: RoutingLayout) -> NDArray[np.uint16]:
    return np.tile(np.arange(layout.experts, dtype=np.uint16), (len(layout.layers), 1))


def _order_bytes(rows: RoutingRows) -> NDArray[np.uint8]:
    return rows.order.astype("u1" if rows.experts <= 256 else "<u2").ravel().view(np.uint8)


def _runs(recorded: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return the lengths of runs of rows: recorded, missing, recorded, …"""
    edges = np.flatnonzero(np.diff(recorded, prepend=np.uint8(1), append=np.uint8(2)))
    return np.diff(edges, prepend=0)


def _recorded(runs: NDArray[np.int32], copied: NDArray[np.int64], layers: int) -> NDArray[np.uint8]:
    """Return which rows are recorded. Raises `CorruptRollouts` if the runs do not cover the rows."""
    own = np.flatnonzero(copied < 0)
    if int(runs.sum(dtype=np.int64)) != len(own) * layers or bool((runs < 0).any()) or bool((runs[1:] == 0).any()):
        raise CorruptRollouts("routing_runs do not cover the rows.")
    if len(runs) < 2:  # all rows are recorded, or there are none
        return np.ones((len(copied), layers), np.uint8)
    recorded = np.zeros((len(copied), layers), np.uint8)
    recorded[own] = np.repeat((1 - np.arange(len(runs)) % 2).astype(np.uint8), runs).reshape(-1, layers)
    source = np.where(copied >= 0, copied, np.arange(len(copied)))
    while bool((source != source[source]).any()):  # a copy may be of a copy
        source = source[source]
    return np.asarray(recorded[source])


def _packed(lengths: NDArray[np.uint8]) -> NDArray[np.uint8]:
    padded = np.append(lengths, np.zeros(len(lengths) % 2, np.uint8))
    return np.asarray(padded[::2] | padded[1::2] << 4, np.uint8)


def _unpacked(codes: NDArray[np.uint8], count: int) -> NDArray[np.uint8]:
    lengths = np.stack([codes & 15, codes >> 4], 1).ravel()
    if lengths[count:].any():
        raise CorruptRollouts("routing_codes has a code too many.")
    return np.asarray(lengths[:count], np.uint8)
