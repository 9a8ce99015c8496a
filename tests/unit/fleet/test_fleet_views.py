"""The output of `deltawire members`, `rollouts` and `top` fits 80 columns, and nothing in the store can harm a terminal."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from rich.cells import cell_len
from typer.testing import CliRunner

from deltawire import Publisher
from deltawire.cli import app
from deltawire.cli.output.fleet_table import short_name
from deltawire.fleet.fleet_keyring import FleetKeyring
from deltawire.format.records.fleet_files import Accepted, AcceptedResult
from deltawire.format.records.fleet_parts import ObjectRef
from deltawire.format.records.member_records import Heartbeat, LinkReport
from deltawire.format.records.signing import SigningKey
from deltawire.format.records.trainer_records import BatchRecord, Board, Rejection, Round, Sampling
from deltawire.format.rollouts import ClaimedVersion, Completion, Rollouts, TokenSpan, sequences_of
from deltawire.format.routing import Routing, RoutingLayout
from deltawire.publish.writer_options import WriterOptions
from deltawire.store import Store, fleet_keys, open_store

tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")

WORDS = ["one", "two", "three", ":smile:", "[red]", "\x1b[2Jdanger\x07", "\u202egnp", "line\nbreak"]
NONCE = "cd" * 16
NAMES = ("gpu-7", "a-machine-with-a-name-as-long-as-names-of-machines-are-17")


class Run:
    """A run with two rounds, two members and three results, written by hand."""

    def __init__(self, folder: Path, key: SigningKey | None = None) -> None:
        self.url = str(folder / "store")
        self.store: Store = open_store(self.url)
        self.keyring = FleetKeyring(key)
        files = folder / "files"
        files.mkdir()
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="one"))
        (files / "tokenizer.json").write_text(tokenizer.to_str())
        with Publisher(self.store, run="views", attachments=files, options=WriterOptions(signing_key=key)) as publisher:
            version = publisher.publish({"weight": np.zeros(8, np.float32)}, step=4)
            self.version = version.seq, ClaimedVersion(4, version.digest)
            self.id = publisher._writer.run.id
            self.epoch = publisher.epoch
        for name, state in zip(NAMES, ("working", "left"), strict=True):
            reason = "RewardError: \x1b[2J it failed\u202e " + "again and " * 20 if state == "left" else None
            beat = Heartbeat(self.id, name, NONCE, state, 1, 4, 2, 123_456, 60_000, ((1, 0, 0),), 0, reason)
            if state == "working":
                beat = replace(beat, link=LinkReport(12_500_000, 81, 3), behind_ms=2340)
            self.store.put(fleet_keys.member_key(name), beat.to_bytes())
        self.store.put(fleet_keys.member_key("liar"), b"{}")
        self.rounds = [self.round(number, for_step) for number, for_step in ((0, 5), (1, 6))]
        first = self.result(0, 0, NAMES[0], [[0, 1], [5, 6, 7]], (1.0, None))
        second = self.result(0, 1, NAMES[1], [[2]], (0.25, -1e9))
        self.result(1, 0, NAMES[0], [[3, 4]], (0.5, 0.0))
        self.store.put(fleet_keys.rollout_key(fleet_keys.RolloutKey(1, 1, 0, "00" * 32)), b"junk")
        accepted = Accepted(0, (first, second)).to_bytes()
        digest = blake3(accepted).hexdigest()
        reference = ObjectRef(fleet_keys.accepted_key(0, digest), len(accepted), digest)
        self.store.put(reference.key, accepted)
        batch = BatchRecord(self.id, self.epoch, 5, 0, NONCE, reference, 0)
        self.store.put(fleet_keys.batch_key(self.epoch, 5), self.keyring.sign(batch).to_bytes())
        rejection = Rejection(self.id, self.epoch, 5, 0, ((1, 0, second.blake3),), "not finite \x1b[2J", 0)
        data = self.keyring.sign(rejection).to_bytes()
        self.store.put(fleet_keys.rejected_key(fleet_keys.RejectedKey(self.epoch, 5, blake3(data).hexdigest())), data)
        board = Board(self.id, self.epoch, 1, 4, 60, {}, False, 7)
        self.store.put(fleet_keys.BOARD, self.keyring.sign(board).to_bytes())

    def round(self, number: int, for_step: int) -> Round:
        rows = ObjectRef(fleet_keys.tasks_key(number, "00" * 32), 9, "00" * 32)
        record = Round(self.id, number, self.epoch, NONCE, for_step, 3, 2, rows, 60, Sampling(samples=2, max_tokens=8), 0)
        self.store.put(fleet_keys.round_key(number), self.keyring.sign(record).to_bytes())
        return record

    def result(self, number: int, task: int, member: str, texts: list[list[int]], rewards: tuple[float | None, ...]) -> AcceptedResult:
        seq, version = self.version

        def completion(tokens: list[int]) -> Completion:
            count = len(tokens)
            spans = (TokenSpan(0, count, seq),)
            arrays = np.array(tokens, np.int32), np.full(count, -0.5, np.float32), np.ones(count, np.uint8)
            return Completion(0, *arrays, rewards, spans, count < 3)

        prompts = (np.array([0, 2], np.int32),)
        made = Rollouts(
            self.id, number, task, 0, member, NONCE, prompts, tuple(map(completion, texts)), ("right", "\x1b[31mform"), {seq: version}
        )
        if (number, task) == (0, 1):
            experts = [np.full((len(each) + 2, 3, 2), -1) for each in texts]
            made = replace(made, routing=Routing.encode(RoutingLayout(8, 2, (0, 1, 2)), sequences_of(prompts, made.completions), experts))
        data = made.to_bytes()
        digest = blake3(data).hexdigest()
        self.store.put(fleet_keys.rollout_key(fleet_keys.RolloutKey(number, task, 0, digest)), data)
        return AcceptedResult(task, 0, digest, len(data), member)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("views"))


def shown(*arguments: str) -> str:
    done = CliRunner(env={"COLUMNS": "80"}).invoke(app, list(arguments))
    assert done.exit_code == 0, done.output
    assert not re.search("[\x1b\x07\u202e]", done.output)
    assert [line for line in done.output.splitlines() if cell_len(line) > 80] == []
    return done.stdout


def as_json(*arguments: str) -> Any:
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_members_are_listed_with_what_they_do(run: Run) -> None:
    heading, titles, *lines = shown("members", run.url).splitlines()
    assert heading == "views  2 members"
    assert titles.split()[:3] == ["member", "state", "step"]
    (reason,) = [line for line in lines if line.startswith("  ")]
    assert reason.startswith("  RewardError: ")
    assert lines[lines.index(reason) - 1].startswith("a-machine")
    words = sorted(line.split()[:3] for line in lines if line is not reason)
    assert words == [["a-machine-...ines-are-17", "left", "4"], ["gpu-7", "working", "4"]]
    found = {each["member"]: each for each in as_json("members", run.url)["members"]}
    assert list(found) == sorted(NAMES)
    assert found["gpu-7"]["working"] == [{"round": 1, "task": 0, "attempt": 0}]
    assert found["gpu-7"]["tokens_per_second"] == 2057.6
    assert (found["gpu-7"]["behind"], found["gpu-7"]["silent"]) == (2, False)
    assert found["gpu-7"]["reason"] is None
    assert found["gpu-7"]["update_seconds"] == 2.34
    assert found["gpu-7"]["link"] == {"bytes_per_second": 12_500_000, "latency_ms": 81, "failures": 3}
    assert found[NAMES[1]]["link"] is found[NAMES[1]]["update_seconds"] is None
    assert found[NAMES[1]]["reason"].startswith("RewardError")


def test_a_wide_terminal_shows_the_links_of_members(run: Run) -> None:
    done = CliRunner(env={"COLUMNS": "160"}).invoke(app, ["members", run.url])
    titles, *lines = done.stdout.splitlines()[1:]
    assert re.sub(" +", " ", titles) == "member state step behind update link latency works on tokens tokens/s heard"
    assert "2.3 s  12.5 MB/s    81 ms" in next(line for line in lines if line.startswith("gpu-7"))


def test_rollouts_are_shown_as_text_with_rewards_and_the_steps_of_their_versions(run: Run) -> None:
    text = shown("rollouts", run.url)
    assert text.splitlines()[:5] == [
        "for step 6  round 1 task 0  by gpu-7 with step 4  uploaded",
        "  prompt",
        "    one three",
        "  right 0.5  �[31mform 0  2 tokens",
        "    :smile: [red]",
    ]
    assert "rejected: not finite �[2J" in " ".join(text.split())
    assert "right 1  �[31mform –  3 tokens, cut off" in text
    assert "    �[2Jdanger� �gnp line\n    break" in text
    assert len(re.findall(r"^  prompt$", text, re.MULTILINE)) == 3
    assert text.count("bytes/token") == 1
    routed = [each["routing"] for each in as_json("rollouts", run.url)["rollouts"]]
    assert sorted(map(bool, routed)) == [False, False, False, True]
    (facts,) = filter(None, routed)
    assert (facts["experts"], facts["top_k"], facts["layers"], facts["broken_rows"]) == (8, 2, [0, 1, 2], 0)
    assert facts["bytes_per_token"] == round(facts["bytes"] / 3, 2)
    only = as_json("rollouts", run.url, "--step", "5", "--member", "gpu-7", "-n", "1")["rollouts"]
    assert [(each["state"], each["completion"], each["tokens"], each["rewards"]) for each in only] == [
        ("accepted", "one two", [0, 1], {"right": 1.0, "\x1b[31mform": None})
    ]
    assert only[0]["versions"] == [{"seq": run.version[0], "step": 4}]
    assert shown("rollouts", run.url, "--step", "99") == "the store holds no such completions\n"


def test_without_a_tokenizer_token_ids_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    done = CliRunner().invoke(app, ["rollouts", run.url, "-n", "1"])
    assert "    3 4\n" in done.stdout
    assert "showing token ids" in done.stderr
    assert as_json("rollouts", run.url)["rollouts"][0]["completion"] is None


def test_top_shows_rounds_and_members(run: Run) -> None:
    text = shown("top", run.url, "-n", "2", "--every", "0.1")
    assert text.count("step 4  board ") == text.count("1 member, 1 working") == 2
    assert text.count("    0         5      2       0          2  acknowledged") == 2
    looks = [
        json.loads(line) for line in CliRunner().invoke(app, ["top", run.url, "-n", "2", "--every", "0.1", "--json"]).stdout.splitlines()
    ]
    assert [[each["round"] for each in look["rounds"]] for look in looks] == [[1, 0]] * 2
    assert [look["board"]["step"] for look in looks] == [4, 4]


def test_top_redraws_one_picture_on_a_terminal(run: Run) -> None:
    main, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")} | {"TERM": "xterm"}
    command = [sys.executable, "-m", "deltawire.cli", "top", run.url, "-n", "3", "--every", "0.1"]
    process = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment)
    os.close(terminal)
    data = b""
    while True:
        try:
            data += os.read(main, 4096)
        except OSError:  # the other end is closed
            break
    text = data.decode()
    assert process.wait() == 0, text
    os.close(main)
    assert text.count("\x1b[1A") >= 2 * 7  # the cursor moves up by as many lines as were printed
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text.replace("\x1b[1A", "\n")).replace("\r", "\n").splitlines()
    assert "\x1b" not in "".join(lines)
    assert [line for line in lines if cell_len(line) > 80] == []
    assert sum("working" in line and "gpu-7" in line for line in lines) >= 3


def test_records_that_no_trusted_key_has_signed_are_not_shown(tmp_path: Path) -> None:
    key = SigningKey.generate()
    run = Run(tmp_path, key)
    forged = replace(run.rounds[1], round=2, rows=ObjectRef(fleet_keys.tasks_key(2, "00" * 32), 9, "00" * 32), signature=None)
    run.store.put(fleet_keys.round_key(2), forged.to_bytes())
    run.result(2, 0, NAMES[0], [[3]], (1.0, 1.0))
    assert [each["round"] for each in as_json("rollouts", run.url, "--run", "views", "--trust", key.public)["rollouts"]] == [1, 0, 0, 0]
    assert [each["round"] for each in as_json("rollouts", run.url)["rollouts"]] == [2, 1, 0, 0, 0]
    run.store.put(fleet_keys.BOARD, Board(run.id, 99, 1, 9, 60, {}, True).to_bytes())
    assert as_json("top", run.url, "-n", "1")["board"]["stop"] is True
    assert as_json("top", run.url, "-n", "1", "--run", "views", "--trust", key.public)["board"] is None
    assert "the trainer has not offered work yet" in shown("top", run.url, "-n", "1", "--run", "views", "--trust", key.public)


def test_a_result_that_does_not_match_its_key_is_skipped(run: Run, tmp_path: Path) -> None:
    copy = Run(tmp_path)
    found = next(iter(copy.store.list(fleet_keys.ROLLOUTS)))
    key = fleet_keys.parse_rollout_key(found.key)
    assert key is not None
    copy.store.put(fleet_keys.rollout_key(key._replace(task=1, attempt=3)), copy.store.get(found.key, limit=1 << 20))
    done = CliRunner().invoke(app, ["rollouts", copy.url, "-n", "100"])
    assert "2 results could not be read" in done.stderr


@pytest.mark.parametrize("width", range(8, 60))
def test_long_names_keep_their_width_and_their_end_in_terminals_without_other_characters_than_ascii(width: int) -> None:
    name = short_name(NAMES[1], width)
    assert name.isascii()
    assert len(name) == min(width, len(NAMES[1]))
    assert name[:1] + name[-2:] == "a17"
