"""The output of commands fits terminals of 80 and of 40 columns, and terminals that cannot show every character."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from rich.cells import cell_len
from terminals import Shown, in_pipe, in_terminal
from test_cli import halves, model, save_sharded, updated

import deltawire

LONG = "model.layers.17.block_sparse_moe.experts.103.down_proj.weight"


def states(count: int) -> list[dict]:
    found = [model() | {LONG: model(7)["lm_head.weight"]}]
    for seed in range(count - 1):
        found.append(updated(found[-1], seed))
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the checkpoints `step-0` and `step-1`, their difference `delta`, a `chain` with a rewind, and one with a `broken` object."""
    place = tmp_path_factory.mktemp("place")
    versions = states(7)
    for number, state in enumerate(versions[:2]):
        save_sharded(place / f"step-{number}", halves(state))
    (place / "delta").write_bytes(deltawire.encode_delta(versions[0], versions[1]))
    with deltawire.Publisher(place / "chain") as publisher:
        for step, state in enumerate(versions):
            publisher.publish(state, step=10**6 + step, meta={"note": "a note that is far too long for one line of a terminal"})
    with deltawire.Publisher(place / "chain", resume_from_seq=3) as publisher:
        publisher.publish(versions[5], step=10**6 + 3)
    shutil.copytree(place / "chain", place / "broken")
    damaged = next((place / "broken").glob(f"data/*/{1:020}/*.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x55")
    return place


def commands(place: Path, name: str) -> dict[str, list[object]]:
    own = place / name
    own.mkdir()
    return {
        "log": ["log", place / "chain"],
        "commits": ["log", place / "chain", "--commits"],
        "show": ["show", place / "chain", 2],
        "inspect": ["inspect", place / "delta"],
        "tensors": ["inspect", place / "delta", "--base", place / "step-0"],
        "verify": ["verify", "--deep", place / "broken"],
        "first": ["publish", place / "step-0", own / "new"],
        "second": ["publish", place / "step-1", own / "new", "--step", 7],
        "forecast": ["publish", place / "step-0", own / "new", "--dry-run"],
        "pull": ["pull", place / "chain", own / "out"],
        "follow": ["follow", place / "chain", own / "mirror", "--once"],
        "damage": ["pull", place / "broken", own / "never", "--at", 1],
        "gc": ["gc", place / "chain"],
        "usage": ["log", "s3:/bucket/prefix"],
        "help": ["publish", "-h"],
    }


CODES = {"verify": 3, "damage": 1, "usage": 2}


def assert_codes(shown: dict[str, Shown]) -> None:
    for name, each in shown.items():
        assert each.code == CODES.get(name, 0), f"{name}: {each.text}"
        assert "Traceback" not in each.text


@pytest.mark.parametrize("columns", [80, 40])
def test_output_fits_the_terminal_and_breaks_no_words(place: Path, columns: int) -> None:
    wanted = commands(place, f"columns-{columns}")
    shown = dict(zip(wanted, in_terminal(columns, *wanted.values()), strict=True))
    assert_codes(shown)
    for name, each in shown.items():
        for line in each.lines:
            # The terminal breaks a word that is longer than a line, such as the key of an object.
            assert cell_len(line) <= columns or " " not in line.strip(), f"{name}: {line!r}"
    words = {word for each in shown.values() for line in each.lines for word in line.split()}
    assert {"checkpoint", "published", "version", "skip"} <= words
    assert LONG in words or any(word.startswith("model.layers.17.") for word in words)
    assert "…" not in shown["inspect"].text + shown["tensors"].text
    text = " ".join(shown["log"].lines)
    assert "a note that is far too long for one line of a terminal" in re.sub(r" +", " ", text)


def test_bars_of_a_publication_have_totals_and_tell_reading_from_writing(place: Path) -> None:
    own = place / "bars"
    own.mkdir()
    first, second = in_terminal(80, ["publish", place / "step-0", own / "new"], ["publish", place / "step-1", own / "new"])
    for each in (first, second):
        assert each.code == 0, each.text
        assert "/?" not in each.text
    assert not [line for line in first.lines if line.startswith("read back")]
    whole = [line for line in first.lines if line.startswith("publish step-0")][-1]
    read = [line for line in second.lines if line.startswith("read back version 1")][-1]
    sent = [line for line in second.lines if line.startswith("publish step-1")][-1]
    amounts = [re.search(r"([\d.]+)/([\d.]+) kB", line) for line in (whole, read, sent)]
    done = [(float(found[1]), float(found[2])) for found in amounts if found]
    assert [pair[0] == pair[1] for pair in done] == [True] * 3, (whole, read, sent)
    assert done[2][0] * 5 < min(done[0][0], done[1][0])


def test_a_terminal_without_unicode_gets_plain_characters(place: Path) -> None:
    wanted = commands(place, "ascii")
    shown = dict(zip(wanted, in_pipe("ascii", *wanted.values()), strict=True))
    assert_codes(shown)
    assert "1 #......<." in shown["log"].text
    assert "->" in shown["inspect"].text
    assert LONG in shown["tensors"].text
    assert re.search(r" [#*+=:,. -]*#[#*+=:,. -]* ", shown["inspect"].text), "a bar"
    assert "8888" not in shown["inspect"].text
    assert "ULPs 1/2-3/" in shown["inspect"].text
    boxes = [line for line in shown["help"].text.splitlines() if line.startswith(("+-", "|"))]
    assert len(boxes) > 10
    assert {len(line) for line in boxes} == {80}, "\n".join(boxes)


def test_damage_is_called_damage_and_counted_by_cause(place: Path) -> None:
    verified, pulled = in_pipe("utf-8", ["verify", "--deep", place / "broken"], ["pull", place / "broken", place / "no", "--at", 1])
    assert "damage found: 1 problem\n" in verified.text
    assert re.search(r"new readers +cannot reach the newest version", verified.text)  # this follows from the damage
    assert verified.text.count(" is damaged: ") == 1
    assert re.search(r"noticed at: version 1 \(commit 1\), .*version 2 \(commit 2\)", verified.text)
    assert re.search(r"error: data/\S+ in \S+ is damaged: ", pulled.text)
