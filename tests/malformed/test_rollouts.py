"""Readers refuse hostile and damaged rollout files with a named error, and need no more memory than the file has bytes."""

from __future__ import annotations

import contextlib
import json
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load, save

from deltawire import Digest
from deltawire.dtypes import dtype_of_numpy
from deltawire.errors import CorruptRollouts, UnsupportedVersion
from deltawire.format.rollouts import _DTYPES, ClaimedVersion, Completion, RolloutLimits, Rollouts, TokenSpan
from deltawire.format.safetensors_header import build_header, place_in_order

RUN, NONCE = "ab" * 16, "cd" * 16


def completion(prompt: int, length: int, *spans: TokenSpan, reward: float | None = 1.0) -> Completion:
    return Completion(
        prompt=prompt,
        tokens=np.arange(length, dtype=np.int32) + 7,
        logprobs=-np.arange(length, dtype=np.float32),
        mask=np.array([1] * (length - 1) + [0], np.uint8),
        rewards=(reward, None),
        spans=spans or (TokenSpan(0, length, 5),),
        finished=prompt == 0,
    )


GOOD = Rollouts(
    run=RUN,
    round=3,
    task=4,
    attempt=5,
    member="gpu-7.west",
    nonce=NONCE,
    prompts=(np.array([1, 2, 3], np.int32), np.array([4], np.int32)),
    completions=(completion(0, 4), completion(1, 3, TokenSpan(0, 1, 5), TokenSpan(1, 3, 9), reward=-0.25), completion(0, 2)),
    reward_names=("right", "größer"),
    versions={5: ClaimedVersion(2, Digest((1, 2, 3, 4))), 9: ClaimedVersion(3, Digest())},
    seconds={"generate": 0.1, "sync": 1e-9},
)
DATA = GOOD.to_bytes()


def changed(edit: Callable[[dict[str, Any], dict[str, Any]], object]) -> bytes:
    """Return the good file after an edit of its tensors and facts, written by another library."""
    length = int.from_bytes(DATA[:8], "little")
    facts = json.loads(json.loads(DATA[8 : 8 + length])["__metadata__"]["facts"])
    tensors = {name: array.copy() for name, array in load(DATA).items()}
    edit(tensors, facts)
    return rebuilt(tensors, facts)


def rebuilt(tensors: dict[str, Any], facts: dict[str, Any]) -> bytes:
    """Return the file in the canonical order and padding, so that only the edit is wrong."""
    order = [name for name in _DTYPES if name in tensors] + [name for name in tensors if name not in _DTYPES]
    placed = place_in_order([(name, dtype_of_numpy(tensors[name].dtype), tensors[name].shape) for name in order])
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return build_header(placed, {"facts": text}) + b"".join(tensors[name].tobytes() for name, _ in placed)


def refuse(data: bytes, limits: RolloutLimits | None = None) -> str:
    with pytest.raises(CorruptRollouts) as caught:
        Rollouts.parse(data, limits)
    return str(caught.value)


def test_a_file_comes_back_as_it_was_written() -> None:
    back = Rollouts.parse(DATA)
    assert back.to_bytes() == DATA
    assert (back.run, back.round, back.task, back.attempt, back.member, back.nonce) == (RUN, 3, 4, 5, "gpu-7.west", NONCE)
    assert back.tokens == 6
    assert back.reward_names == GOOD.reward_names
    assert dict(back.versions) == dict(GOOD.versions)
    assert dict(back.seconds) == dict(GOOD.seconds)
    for one, other in zip(back.completions, GOOD.completions, strict=True):
        assert (one.prompt, one.rewards, one.spans, one.finished) == (other.prompt, other.rewards, other.spans, other.finished)
        for name in ("tokens", "logprobs", "mask"):
            assert getattr(one, name).tobytes() == getattr(other, name).tobytes()
            assert getattr(one, name).dtype == getattr(other, name).dtype
    assert [prompt.tolist() for prompt in back.prompts] == [[1, 2, 3], [4]]


def test_any_safetensors_reader_opens_it() -> None:
    assert load(DATA)["tokens"].tolist() == [7, 8, 9, 10, 7, 8, 9, 7, 8]


def test_it_is_rebuilt_byte_for_byte_by_the_tests_own_writer() -> None:
    assert changed(lambda tensors, facts: None) == DATA


def test_a_file_cut_short_anywhere_or_with_anything_behind_it_is_refused() -> None:
    for length in range(len(DATA)):
        refuse(DATA[:length])
    refuse(DATA + b"\0")


def test_any_bit_that_flips_is_refused_or_leaves_a_file_that_is_one() -> None:
    """Readers detect both cases, because they know the hash of the result's bytes."""
    header = 8 + int.from_bytes(DATA[:8], "little")
    silent = 0
    for index in range(len(DATA)):
        for bit in range(8):
            flipped = bytearray(DATA)
            flipped[index] ^= 1 << bit
            try:
                assert Rollouts.parse(bytes(flipped)).to_bytes() == flipped
                silent += index >= header
            except (CorruptRollouts, UnsupportedVersion):
                pass
    assert silent  # a flipped bit can turn a token into another valid one


@given(st.binary(max_size=300))
def test_noise_is_refused(data: bytes) -> None:
    refuse(data)


@given(st.integers(0, len(DATA) - 1), st.binary(min_size=1, max_size=8))
def test_a_patch_anywhere_is_refused_or_leaves_a_file_that_is_one(index: int, patch: bytes) -> None:
    data = (DATA[:index] + patch + DATA[index + len(patch) :])[: len(DATA)]
    with contextlib.suppress(CorruptRollouts, UnsupportedVersion):
        assert Rollouts.parse(data).to_bytes() == data


def _set(name: str, index: Any, value: Any) -> Callable[[dict[str, Any], dict[str, Any]], object]:
    return lambda tensors, facts: tensors[name].__setitem__(index, value)


def _fact(name: str, value: Any) -> Callable[[dict[str, Any], dict[str, Any]], object]:
    return lambda tensors, facts: facts.__setitem__(name, value)


def _tensor(name: str, value: Any) -> Callable[[dict[str, Any], dict[str, Any]], object]:
    return lambda tensors, facts: tensors.__setitem__(name, np.asarray(value))


LIES: dict[str, Callable[[dict[str, Any], dict[str, Any]], object]] = {
    "a length that is longer": _set("lengths", 0, 5),
    "a length that is negative": _set("lengths", 0, -4),
    "lengths that sum up to the right number by overflow": _tensor("lengths", np.array([2**31 - 1, 2**31 - 1, 11], np.int32)),
    "a completion without tokens": lambda tensors, facts: tensors["lengths"].__setitem__(slice(0, 2), (0, 7)),
    "a prompt's length that is longer": _set("prompt_lengths", 0, 4),
    "a prompt that is not there": _set("prompt", 0, 2),
    "a prompt below 0": _set("prompt", 0, -1),
    "a token below 0": _set("tokens", 0, -1),
    "a prompt's token below 0": _set("prompt_tokens", 0, -1),
    "a mask of 2": _set("mask", 0, 2),
    "finished being 2": _set("finished", 0, 2),
    "scored being 2": _set("scored", 0, 2),
    "a log-prob that is not a number": _set("logprobs", 0, np.nan),
    "a log-prob of infinity": _set("logprobs", 0, -np.inf),
    "a log-prob above 0": _set("logprobs", 0, 0.5),
    "a reward that is not a number": _set("rewards", (0, 0), np.nan),
    "a reward that is infinite": _set("rewards", (0, 0), np.inf),
    "a reward that is not scored": _set("rewards", (0, 1), 1.0),
    "a span with a gap": _set("spans", (1, 2), 0),
    "a span beyond its completion": _set("spans", (0, 2), 5),
    "a span short of its completion": _set("spans", (0, 2), 3),
    "a span that ends before it begins": _set("spans", (2, 2), 1),
    "a span of a completion that is not there": _set("spans", (3, 0), 3),
    "spans out of order": _set("spans", (3, 0), 0),
    "a span of a version that is not named": _set("spans", (0, 3), 6),
    "a span of a version below 0": _set("spans", (0, 3), -1),
    "no spans": _tensor("spans", np.zeros((0, 4), np.int64)),
    "spans of three numbers": _tensor("spans", np.zeros((4, 3), np.int64)),
    "a tensor too few": lambda tensors, facts: tensors.pop("mask"),
    "a tensor too many": _tensor("more", np.zeros(1, np.int32)),
    "a tensor of another type": _tensor("tokens", np.zeros(9, np.int64)),
    "a mask of another length": _tensor("mask", np.zeros(8, np.uint8)),
    "rewards of another shape": _tensor("rewards", np.zeros((3, 3))),
    "no prompts": lambda tensors, facts: tensors.update(prompt_tokens=np.zeros(0, np.int32), prompt_lengths=np.zeros(0, np.int32)),
    "a version that is not used": _fact("versions", [[5, 2, "00" * 16], [9, 3, "00" * 16], [10, 3, "00" * 16]]),
    "versions that do not rise": _fact("versions", [[9, 3, "00" * 16], [5, 2, "00" * 16]]),
    "a version without a digest": _fact("versions", [[5, 2, ""], [9, 3, "00" * 16]]),
    "a version that is no list": _fact("versions", [5, 9]),
    "a name that occurs twice": _fact("reward_names", ["right", "right"]),
    "a name that is no text": _fact("reward_names", ["right", 1]),
    "a name without characters": _fact("reward_names", ["right", ""]),
    "a field too many": _fact("more", 1),
    "a field too few": lambda tensors, facts: facts.pop("nonce"),
    "a member that cannot be one": _fact("member", "../x"),
    "another kind": _fact("deltawire", "lease"),
    "the version with routing, without any": _fact("version", 2),
    "routing in the version without it": _fact("routing", {"experts": 2, "top_k": 1, "layers": [0], "broken": 0}),
    "a task that has no key": _fact("task", 10**5),
    "seconds that are no number": _fact("seconds", {"sync": "soon"}),
    "seconds that are not finite": _fact("seconds", {"sync": "inf"}),
    "seconds that are spelt otherwise": _fact("seconds", {"sync": "1.50"}),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_rollout_file_that_contradicts_itself_is_refused(lie: str) -> None:
    data = changed(LIES[lie])
    assert data != DATA
    refuse(data)


def test_a_later_version_is_called_by_its_name() -> None:
    with pytest.raises(UnsupportedVersion):
        Rollouts.parse(changed(_fact("version", 3)))


def test_another_spelling_of_the_same_content_is_refused() -> None:
    tensors = load(DATA)
    length = int.from_bytes(DATA[:8], "little")
    facts = json.loads(DATA[8 : 8 + length])["__metadata__"]["facts"]
    refuse(save(tensors, {"facts": facts}))  # this library writes the tensors in another order
    refuse(changed(lambda tensors, facts: None).replace(b'{"__metadata__"', b'{ "__metadata__"', 1))


@pytest.mark.parametrize(
    "limits",
    [
        RolloutLimits(file_bytes=len(DATA) - 1),
        RolloutLimits(prompts=1),
        RolloutLimits(completions=2),
        RolloutLimits(spans=3),
        RolloutLimits(versions=1),
    ],
)
def test_a_rollout_file_that_exceeds_a_limit_is_refused(limits: RolloutLimits) -> None:
    refuse(DATA, limits)


def test_headers_that_claim_the_moon_cost_no_memory() -> None:
    huge = 1 << 40
    claims = [
        huge.to_bytes(8, "little") + DATA[8:],
        (90_000_000).to_bytes(8, "little") + DATA[8:],
        DATA.replace(b'"shape":[9]', b'"shape":[9999999999]', 1),
    ]
    tracemalloc.start()
    try:
        for data in claims:
            refuse(data)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "changes",
    [
        {"member": ""},
        {"run": "x"},
        {"attempt": 1000},
        {"completions": ()},
        {"prompts": ()},
        {"reward_names": ("right",)},
        {"versions": {}},
        {"seconds": {"sync": float("nan")}},
        {"prompts": (np.array([2**31], np.int64), np.array([1]))},
        {"prompts": (np.zeros((2, 2), np.int32), np.array([1]))},
        {"completions": (replace(GOOD.completions[0], logprobs=np.zeros(3, np.float32)), *GOOD.completions[1:])},
        {"completions": (replace(GOOD.completions[0], rewards=(float("nan"), None)), *GOOD.completions[1:])},
        {"completions": (replace(GOOD.completions[0], tokens=np.array([0.5, 1, 2, 3])), *GOOD.completions[1:])},
        {"seconds": {"x" * 70_000: 1.0}},
    ],
)
def test_a_writer_refuses_what_a_reader_would(changes: dict[str, Any]) -> None:
    with pytest.raises(CorruptRollouts):
        replace(GOOD, **changes).to_bytes()


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6),
            st.floats(-1e300, 1e300, allow_nan=False),
            st.booleans(),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_whatever_can_be_written_comes_back(made: list[tuple[list[int], float, bool]]) -> None:
    completions = tuple(
        Completion(
            prompt=0,
            tokens=np.array(tokens, np.int32),
            logprobs=np.full(len(tokens), -1.5, np.float32),
            mask=np.ones(len(tokens), np.uint8),
            rewards=(reward, reward if finished else None),
            spans=(TokenSpan(0, len(tokens), 5),),
            finished=finished,
        )
        for tokens, reward, finished in made
    )
    whole = replace(GOOD, completions=completions, prompts=GOOD.prompts[:1], versions={5: GOOD.versions[5]})
    back = Rollouts.parse(whole.to_bytes())
    assert [one.tokens.tolist() for one in back.completions] == [tokens for tokens, _, _ in made]
    assert [one.rewards for one in back.completions] == [one.rewards for one in completions]
