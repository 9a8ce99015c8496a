"""A file of rollouts: the result of one task. It is a safetensors file, read as strictly as any record.

    prompt_tokens  I32 [P]    the prompts, one after the other           prompt_lengths  I32 [prompts]
    tokens         I32 [T]    the completions, one after the other       lengths         I32 [completions]
    logprobs       F32 [T]    behaviour log-prob of each token           prompt          I32 [completions]   index of its prompt
    mask           U8  [T]    1: a token of the policy's own             finished        U8  [completions]
    spans          I64 [S,4]  completion, start, end, seq of the version rewards F64, scored U8  [completions, reward names]

The metadata "facts" is a record in canonical form. It names the member, the task and the versions. A file of version 2 also has the experts
that each token went to (routing.py). docs/protocol.md §10 is normative.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..dtypes import dtype_named
from ..errors import CorruptRecord, CorruptRollouts
from .digest import Digest
from .records.canonical import MAX_RECORD_BYTES, Fields, dump
from .records.fleet_parts import read_attempt, read_number
from .records.record_parts import NONCE, READER
from .routing import ROUTING_DTYPES, Routing, Sequences
from .safetensors_header import LENGTH_BYTES, MalformedHeader, TensorEntry, build_header, header_length, parse_header, place_in_order

_MOST_NAMES = 64
_MOST_HEADER = 4 * MAX_RECORD_BYTES
_DTYPES = {
    "spans": "I64",
    "rewards": "F64",
    "prompt_tokens": "I32",
    "prompt_lengths": "I32",
    "tokens": "I32",
    "lengths": "I32",
    "prompt": "I32",
    "logprobs": "F32",
    "mask": "U8",
    "finished": "U8",
    "scored": "U8",
}
_ROUTED_DTYPES = dict(sorted((_DTYPES | ROUTING_DTYPES).items(), key=lambda item: -dtype_named(item[1]).itemsize))
"""The tensors of a file with routing: those of wider types first, otherwise in the order of the tables."""
_NUMPY = {"I64": "<i8", "F64": "<f8", "I32": "<i4", "F32": "<f4", "U8": "u1"}


@dataclass(frozen=True, slots=True)
class RolloutLimits:
    """The limits of one file. A parser needs memory for about twice `file_bytes` and three times `routing_ids`, whatever the file says."""

    file_bytes: int = 256 << 20
    prompts: int = 1 << 16
    completions: int = 1 << 16
    spans: int = 1 << 18
    versions: int = 1 << 10
    routing_ids: int = 1 << 28


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Some tokens of a completion, and the version that made them."""

    start: int
    """The first of these tokens, counted from 0."""
    end: int
    """One past the last of them."""
    seq: int
    """The version that made them."""


@dataclass(frozen=True, slots=True)
class ClaimedVersion:
    """Step and digest of a version that made tokens, as the member claims them.

    Parameters
    ----------
    step
        The training step of the version.
    digest
        The digest of its weights.
    """

    step: int
    """The training step of the version."""
    digest: Digest
    """The digest of its weights."""


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """One completion of a prompt."""

    prompt: int
    """The index of the prompt in `Rollouts.prompts`."""
    tokens: NDArray[np.int32]
    """Its token ids."""
    logprobs: NDArray[np.float32]
    """The log-prob of each token, under the distribution from which it was drawn."""
    mask: NDArray[np.uint8]
    """1 for each token that the policy drew, 0 for each that an environment added."""
    rewards: tuple[float | None, ...]
    """Its rewards, in the order of `Rollouts.reward_names`; None for a reward that was not given."""
    spans: tuple[TokenSpan, ...]
    """Says which version made which tokens. The spans follow each other from the first token to the last."""
    finished: bool
    """Whether it ended by itself, and not at the limit of tokens."""
    routing: tuple[Routing, int] | None = None
    """The routing of its file, and its own index there; None if the file has none."""

    @property
    def experts(self) -> NDArray[np.int16] | None:
        """The experts [tokens, layers with experts, top k] that processed its prompt and its own tokens, −1 where nothing was recorded.

        None if the member did not record them.
        """
        return None if self.routing is None else self.routing[0].of_completion(self.routing[1])


@dataclass(frozen=True, slots=True, eq=False)
class Rollouts:
    """The result of one attempt at one task."""

    run: str
    """The id of the run."""
    round: int
    """The number of the round."""
    task: int
    """The number of the task within the round."""
    attempt: int
    """The number of the attempt at the task."""
    member: str
    """The name of the member that made it."""
    nonce: str
    """The nonce of the member's lease."""
    prompts: tuple[NDArray[np.int32], ...]
    """The token ids of each prompt."""
    completions: tuple[Completion, ...]
    """All completions of all prompts."""
    reward_names: tuple[str, ...]
    """The names of the rewards that completions have."""
    versions: Mapping[int, ClaimedVersion]
    """Exactly the versions that occur in spans, by their numbers."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """How long each phase took, for people."""
    routing: Routing | None = None
    """The experts that processed each token; None if the member did not record them."""

    @property
    def tokens(self) -> int:
        """The number of tokens that the policy drew. Throughput counts these."""
        return sum(int(one.mask.sum()) for one in self.completions)

    def to_bytes(self) -> bytes:
        """Return the file. Raises `CorruptRollouts` if `parse` would refuse it, so that a writer notices its own mistake."""
        try:
            arrays = self._arrays()
            placed = _placed({name: array.shape for name, array in arrays.items()}, _dtypes(self.routing is not None))
            header = build_header(placed, _metadata(self._facts()))
            data = b"".join([header, *(arrays[name].tobytes() for name, _ in placed)])
        except (ValueError, OverflowError, TypeError) as error:
            raise CorruptRollouts(f"these rollouts cannot be written ({error}).") from None
        Rollouts.parse(data)
        return data

    @classmethod
    def parse(cls, data: bytes, limits: RolloutLimits | None = None) -> Rollouts:
        """Return the rollouts in a file.

        Raises `CorruptRollouts` for anything that no writer makes, and `UnsupportedVersion` for a later format. A file cannot make it
        allocate memory: its arrays are views of `data`, and their lengths are checked first.

        Parameters
        ----------
        data
            The bytes of the file.
        limits
            How much the file may hold; the defaults of `RolloutLimits` if None.
        """
        limits = limits or RolloutLimits()
        try:
            return _parse(data, limits)
        except (MalformedHeader, CorruptRecord) as error:
            raise CorruptRollouts(f"a file of rollouts cannot be read: {error}") from None

    def _arrays(self) -> dict[str, NDArray[Any]]:
        every = self.completions
        rewards = [[0.0 if reward is None else reward for reward in one.rewards] for one in every]
        spans = [(index, span.start, span.end, span.seq) for index, one in enumerate(every) for span in one.spans]
        table = (len(every), len(self.reward_names))
        return {
            "spans": np.array(spans, "<i8").reshape(-1, 4),
            "rewards": np.array(rewards, "<f8").reshape(table),
            "prompt_tokens": _joined(self.prompts, "<i4"),
            "prompt_lengths": np.array([len(one) for one in self.prompts], "<i4"),
            "tokens": _joined([one.tokens for one in every], "<i4"),
            "lengths": np.array([len(one.tokens) for one in every], "<i4"),
            "prompt": np.array([one.prompt for one in every], "<i4"),
            "logprobs": _joined([one.logprobs for one in every], "<f4"),
            "mask": _joined([one.mask for one in every], "u1"),
            "finished": np.array([one.finished for one in every], "u1"),
            "scored": np.array([[reward is not None for reward in one.rewards] for one in every], "u1").reshape(table),
            **({} if self.routing is None else self.routing.arrays),
        }

    def _facts(self) -> dict[str, Any]:
        attempt = {"run": self.run, "round": self.round, "task": self.task, "attempt": self.attempt}
        versions = [[seq, ref.step, ref.digest.hex()] for seq, ref in sorted(self.versions.items())]
        who = {"member": self.member, "nonce": self.nonce, "reward_names": list(self.reward_names), "versions": versions}
        seconds = {name: repr(float(value)) for name, value in self.seconds.items()}
        routing = {} if self.routing is None else {"routing": self.routing.plain()}
        return {"deltawire": "rollouts", "version": 2 if routing else 1, **attempt, **who, "seconds": seconds, **routing}


def _parse(data: bytes, limits: RolloutLimits) -> Rollouts:
    if len(data) > limits.file_bytes:
        raise MalformedHeader(f"it has {len(data):,} bytes; {limits.file_bytes:,} are allowed.")
    length = header_length(data[:LENGTH_BYTES], len(data))
    if length > _MOST_HEADER:
        raise MalformedHeader(f"its header has {length:,} bytes.")
    header = parse_header(data[LENGTH_BYTES : LENGTH_BYTES + length], len(data))
    if header.metadata is None or header.metadata.keys() != {"facts"}:
        raise MalformedHeader("its metadata are not those of rollouts.")
    facts = Fields.parse(header.metadata["facts"].encode(errors="replace"), "rollouts", versions=(1, 2))
    dtypes = _dtypes(facts.version == 2)
    if header.entries.keys() != dtypes.keys():
        raise MalformedHeader("its tensors are not those of rollouts.")
    expected = build_header(_placed({name: header.entries[name].shape for name in dtypes}, dtypes), header.metadata)
    if expected != data[: len(expected)]:  # there is one spelling: types, order and padding are fixed
        raise MalformedHeader("its header is not in canonical form.")
    arrays = {name: _array(data, header.data_start, entry) for name, entry in header.entries.items()}
    return _rollouts(facts, arrays, limits, len(data))


def _rollouts(facts: Fields, arrays: Mapping[str, NDArray[Any]], limits: RolloutLimits, file_bytes: int) -> Rollouts:
    run = facts.matching("run", NONCE)
    attempt = read_attempt(facts)
    member, nonce = facts.matching("member", READER), facts.matching("nonce", NONCE)
    names = tuple(_text(facts, name) for name in facts.items("reward_names"))
    versions = _versions(facts, limits)
    seconds = {name: read_number(Fields({name: text}, "rollouts.seconds"), name) for name, text in facts.strings("seconds").items()}
    routing = facts.object("routing") if facts.version == 2 else None
    facts.done()
    if len(set(names)) != len(names) or max(len(names), len(seconds)) > _MOST_NAMES:
        facts.refuse(f"it names a reward twice, or more than {_MOST_NAMES} of something")
    _check_shapes(arrays, len(names), limits)
    prompts = _cut(arrays["prompt_tokens"], arrays["prompt_lengths"])
    spans = _spans(arrays["spans"], arrays["lengths"])
    _check_values(arrays, len(prompts))
    if {span.seq for each in spans for span in each} != versions.keys():
        facts.refuse("its versions are not those of its spans")
    tokens, logprobs, mask = (_cut(arrays[name], arrays["lengths"]) for name in ("tokens", "logprobs", "mask"))
    routed = None
    if routing is not None:
        sequences = Sequences.of(prompts, list(zip(arrays["prompt"].tolist(), tokens, strict=True)))
        routed = Routing.read(routing, arrays, sequences, most_ids=limits.routing_ids, file_bytes=file_bytes)
    completions = tuple(
        Completion(
            prompt=int(arrays["prompt"][index]),
            tokens=tokens[index],
            logprobs=logprobs[index],
            mask=mask[index],
            rewards=tuple(
                float(value) if known else None for value, known in zip(arrays["rewards"][index], arrays["scored"][index], strict=True)
            ),
            spans=spans[index],
            finished=bool(arrays["finished"][index]),
            routing=None if routed is None else (routed, index),
        )
        for index in range(len(tokens))
    )
    return Rollouts(run, *attempt, member, nonce, tuple(prompts), completions, names, versions, seconds, routed)


def sequences_of(prompts: Sequence[NDArray[np.int32]], completions: Sequence[Completion]) -> Sequences:
    """Return the tokens that a model processes for each completion. Raises `CorruptRollouts` if they are too many for routing.

    Parameters
    ----------
    prompts
        The token ids of each prompt.
    completions
        The completions.
    """
    return Sequences.of(prompts, [(one.prompt, one.tokens) for one in completions])


def _versions(facts: Fields, limits: RolloutLimits) -> dict[int, ClaimedVersion]:
    versions: dict[int, ClaimedVersion] = {}
    listed = facts.items("versions")
    if len(listed) > limits.versions:
        facts.refuse(f"it names {len(listed):,} versions; {limits.versions:,} are allowed")
    for value in listed:
        if not isinstance(value, list) or [type(part) for part in value] != [int, int, str]:
            facts.refuse("a version is [seq, step, digest]")
        seq, step, digest = value
        if min(seq, step) < 0 or not NONCE.fullmatch(digest) or (versions and seq <= max(versions)):
            facts.refuse("its versions are malformed, or not in ascending order")
        versions[seq] = ClaimedVersion(step, Digest.from_hex(digest))
    return versions


def _check_shapes(arrays: Mapping[str, NDArray[Any]], names: int, limits: RolloutLimits) -> None:
    prompts, completions, tokens = (arrays[name].size for name in ("prompt_lengths", "lengths", "tokens"))
    shapes = {
        "prompt_tokens": (arrays["prompt_tokens"].size,),
        "prompt_lengths": (prompts,),
        "tokens": (tokens,),
        "logprobs": (tokens,),
        "mask": (tokens,),
        "lengths": (completions,),
        "prompt": (completions,),
        "finished": (completions,),
        "rewards": (completions, names),
        "scored": (completions, names),
        "spans": (arrays["spans"].size // 4, 4),
    }
    for name, shape in shapes.items():
        if arrays[name].shape != shape:
            raise MalformedHeader(f"{name} has the shape {list(arrays[name].shape)} instead of {list(shape)}.")
    if not (1 <= prompts <= limits.prompts and 1 <= completions <= limits.completions and shapes["spans"][0] <= limits.spans):
        raise MalformedHeader(f"it has {prompts:,} prompts, {completions:,} completions and {shapes['spans'][0]:,} spans.")
    for lengths, whole in (("prompt_lengths", "prompt_tokens"), ("lengths", "tokens")):
        if int(arrays[lengths].min()) < 1 or int(arrays[lengths].sum(dtype=np.int64)) != arrays[whole].size:
            raise MalformedHeader(f"{lengths} does not divide {whole} into parts of at least one token.")


def _check_values(arrays: Mapping[str, NDArray[Any]], prompts: int) -> None:
    for name in ("mask", "finished", "scored"):
        if arrays[name].size and int(arrays[name].max()) > 1:
            raise MalformedHeader(f"{name} holds more than 0 and 1.")
    if min(int(arrays["tokens"].min()), int(arrays["prompt_tokens"].min()), int(arrays["prompt"].min())) < 0:
        raise MalformedHeader("it has tokens or prompts below 0.")
    if int(arrays["prompt"].max()) >= prompts:
        raise MalformedHeader("a completion belongs to a prompt that does not exist.")
    # NaN compares false. Probabilities a little above 1 are what rounding makes of 1.
    if not bool((arrays["logprobs"] <= 1e-3).all()) or not bool(np.isfinite(arrays["logprobs"]).all()):
        raise MalformedHeader("a log-prob is not a finite number up to 0.")
    if not bool(np.isfinite(arrays["rewards"]).all()) or bool(arrays["rewards"][arrays["scored"] == 0].view("<i8").any()):
        raise MalformedHeader("a reward is not finite, or belongs to a completion that has no such reward.")


def _spans(table: NDArray[np.int64], lengths: NDArray[np.int32]) -> list[tuple[TokenSpan, ...]]:
    """Return the spans of each completion. They must cover it in order, without gaps or overlaps."""
    found: list[list[TokenSpan]] = [[] for _ in lengths]
    last = 0
    for index, start, end, seq in table.tolist():
        if not last <= index < len(found):
            raise MalformedHeader("its spans belong to completions that do not exist, or are out of order.")
        before = found[index][-1].end if found[index] else 0
        if start != before or end <= start or seq < 0:
            raise MalformedHeader("its spans do not follow each other.")
        found[index].append(TokenSpan(start, end, seq))
        last = index
    for spans, length in zip(found, lengths.tolist(), strict=True):
        if not spans or spans[-1].end != length:
            raise MalformedHeader("its spans do not cover a completion.")
    return [tuple(spans) for spans in found]


def _dtypes(has_routing: bool) -> dict[str, str]:
    return _ROUTED_DTYPES if has_routing else _DTYPES


def _placed(shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, str]) -> list[tuple[str, TensorEntry]]:
    return place_in_order([(name, dtype_named(dtype), shapes[name]) for name, dtype in dtypes.items()])


def _metadata(facts: Mapping[str, Any]) -> dict[str, str]:
    text = dump(dict(facts))
    if len(text) > MAX_RECORD_BYTES:
        raise ValueError(f"what is said about them takes {len(text):,} bytes")
    return {"facts": text.decode()}


def _array(data: bytes, data_start: int, entry: TensorEntry) -> NDArray[Any]:
    flat = np.frombuffer(data, _NUMPY[entry.dtype.name], offset=data_start + entry.begin, count=entry.nbytes // entry.dtype.itemsize)
    return flat.reshape(entry.shape)


def _cut(whole: NDArray[Any], lengths: NDArray[np.int32]) -> list[NDArray[Any]]:
    return np.split(whole, np.cumsum(lengths, dtype=np.int64)[:-1])


def _joined(parts: Any, dtype: str) -> NDArray[Any]:
    arrays = [np.asarray(part) for part in parts]
    if any(array.ndim != 1 for array in arrays):
        raise ValueError("tokens, log-probs and masks are one-dimensional")
    whole: NDArray[Any] = np.concatenate(arrays) if arrays else np.zeros(0)
    return _exactly(whole, dtype)


def _exactly(whole: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Convert to this type. Refuses integers that it cannot hold, so that a token never silently becomes another one."""
    if np.dtype(dtype).kind != "f" and whole.size and not np.array_equal(whole.astype(dtype), whole):
        raise ValueError(f"there are values that {np.dtype(dtype)} cannot hold")
    return whole.astype(dtype)


def _text(facts: Fields, value: Any) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= 200:
        facts.refuse("a reward's name has 1 to 200 characters")
    return value
