"""Each output line of members and of `deltawire fleet` names its member. Lines never mix, and no line can harm a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from deltawire import Publisher
from deltawire.cli.commands.fleet import _Output
from deltawire.cli.commands.member import _View
from deltawire.errors import UnusableReward
from deltawire.events import Event
from deltawire.fleet import Coordinator, FleetOptions, Sampling
from deltawire.fleet.local_members import LocalMember
from deltawire.fleet.member import Member
from deltawire.fleet.member_output import event_of
from deltawire.fleet.supervision import PermanentFailure
from deltawire.rl.member import RewardScorer
from deltawire.store.memory import MemoryStore

HOSTILE = "\x1b[2J\x1b]0;owned\x07\u202egnp.exe"
FAKE_MEMBER = """#!/bin/sh
printf 'joined\\n'
printf 'a reward that prints \\033[2Jthis\\n' >&2
printf '{"event": "generated", "tokens": 3}\\n'
printf '{"nan": NaN}\\n'
printf 'no end of line'
exec cat > /dev/null  # until the process that started it has ended
"""


@pytest.fixture
def fake_member(tmp_path: Path) -> Path:
    path = tmp_path / "member.sh"
    path.write_text(FAKE_MEMBER)
    path.chmod(0o755)
    return path


def test_a_member_s_output_is_read_line_by_line(fake_member: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(fake_member))
    seen: list[tuple[str, bool]] = []
    four = threading.Event()
    member = LocalMember([], lambda line, is_error: (seen.append((line, is_error)), len(seen) == 4 and four.set()))
    assert four.wait(300)
    assert member.ending() is None
    assert member._process.stdin is not None
    member._process.stdin.close()  # this also happens when the parent process ends
    member._process.wait(300)
    for reader in member._readers:
        reader.join(300)
    assert member.ending() == ""
    assert [line for line, is_error in seen if is_error] == ["a reward that prints \x1b[2Jthis"]
    lines = [line for line, is_error in seen if not is_error]
    assert lines == ["joined", '{"event": "generated", "tokens": 3}', '{"nan": NaN}', "no end of line"]


def test_every_line_of_a_fleet_says_which_member_it_is_about(capsys: pytest.CaptureFixture[str]) -> None:
    output = _Output(["local-0", "a-very-long-name-of-a-machine-17"], as_json=False, takes_events=False)
    output.relay("local-0", "12:00:00  joined as local-0", False)
    output.relay("a-very-long-name-of-a-machine-17", f"text {HOSTILE}", True)
    output.relay("local-0", "  ", False)
    output(Event("member-died", {"member": "local-0", "reason": "killed by SIGKILL"}, 0.0))
    printed, notices = capsys.readouterr()
    assert printed.splitlines() == ["local-0               12:00:00  joined as local-0"]
    assert [line.split()[0] for line in notices.splitlines()] == ["a-very-l...achine-17", "local-0"]
    assert not re.search("[\x1b\x07\u202e]", notices)
    assert notices.splitlines()[1].endswith("died: killed by SIGKILL")


def test_a_long_line_is_not_broken_in_a_file_and_every_part_is_labelled_in_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    output = _Output(["f-0"], as_json=False, takes_events=False)
    long = "12:00:00  will try again: " + "word " * 30 + "end"
    output.relay("f-0", long, True)
    output.relay("f-0", long, False)
    printed, notices = capsys.readouterr()
    assert printed.splitlines() == notices.splitlines() == [f"f-0  {long}"]
    monkeypatch.setenv("FORCE_COLOR", "1")  # the output now behaves as on a terminal
    output.relay("f-0", long, True)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().err).splitlines()
    assert len(lines) > 2
    assert all(line.startswith("f-0  ") and len(line) <= 40 for line in lines)
    assert " ".join(" ".join(line.removeprefix("f-0").split()) for line in lines) == " ".join(long.split())


def test_members_do_not_break_lines_for_a_fleet_and_a_permanent_failure_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "member.sh"
    script.write_text('#!/bin/sh\necho "columns ${COLUMNS-none}"\nexit 78\n')
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setenv("COLUMNS", "80")
    seen: list[str] = []
    member = LocalMember([], lambda line, is_error: seen.append(line))
    member._process.wait(300)
    for reader in member._readers:
        reader.join(300)
    assert seen == ["columns none"]
    assert isinstance(member.ending(), PermanentFailure)


def test_with_json_every_line_is_an_object_with_the_member_s_name(capsys: pytest.CaptureFixture[str]) -> None:
    output = _Output(["a"], as_json=True, takes_events=True)
    error = '{"error": {"type": "X", "message": "broke"}}'
    for line in ('{"event": "joined", "member": "own"}', error, "printed by a reward", '{"x": NaN}', "[" * 50_000):
        output(event_of("a", line, False))
    output(event_of("a", "a warning", True))
    output(Event("member-left", {"member": "a"}, 5.0))
    printed, notices = capsys.readouterr()
    found = [json.loads(line) for line in printed.splitlines()]
    assert [each["member"] for each in found] == ["own", "a", "a", "a", "a", "a", "a"]
    assert [each["event"] for each in found] == ["joined", "failed", "output", "output", "output", "output", "member-left"]
    assert all(each["time"].endswith("Z") for each in found)
    assert (found[1]["error"], found[1]["reason"]) == ("X", "broke")
    assert (found[2]["line"], found[2]["stream"]) == ("printed by a reward", "stdout")
    assert (found[5]["line"], found[5]["stream"]) == ("a warning", "stderr")
    assert found[-1]["time"] == "1970-01-01T00:00:05.000Z"
    assert notices == ""


def test_events_are_printed_as_the_lines_that_a_member_would_print(capsys: pytest.CaptureFixture[str]) -> None:
    """With --metrics, members print events. People see the same text as without it."""
    output = _Output(["a"], as_json=False, takes_events=True)
    error = '{"error": {"type": "X", "message": "broke"}}'
    joined, strange = '{"event": "joined", "member": "a", "time": "1970-01-01T00:00:00Z"}', '{"event": "swapped", "seq": 3}'
    for line in (joined, strange, f"text {HOSTILE}", error):
        output(event_of("a", line, False))
    output(event_of("a", "error: broke", True))
    output(Event("member-died", {"member": "a", "reason": "exit code 1"}))
    printed, notices = capsys.readouterr()
    lines = printed.splitlines()
    assert [line.split()[0] for line in lines] == ["a", "a", "a"]
    assert lines[0].endswith("joined as a")
    assert '"event": "swapped"' in lines[1]
    assert not re.search("[\x1b\x07\u202e]", printed)
    assert [line.split("  ")[-1] for line in notices.splitlines()] == ["error: broke", "died: exit code 1"]


def test_members_of_a_fleet_do_not_paint_over_each_other_on_a_terminal(tmp_path: Path, fake_member: Path) -> None:
    """The test runs the whole command on a terminal of 80 columns, with small scripts as members."""
    script = "import sys; executable, sys.executable = sys.executable, sys.argv.pop(1)\nfrom deltawire.cli import main\nmain()\n"
    arguments = ["fleet", "3", "--from", str(tmp_path / "store"), "--env", "m:f", "--name", "local"]
    main, terminal = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80"}
    command = [sys.executable, "-c", script, str(fake_member), *arguments]
    fleet = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=terminal, stderr=terminal, env=environment)
    os.close(terminal)
    text = ""
    try:
        while text.count("no end of line") < 3 and text.count('{"nan": NaN}') < 3:
            text += os.read(main, 4096).decode(errors="replace")
    finally:
        fleet.terminate()
        fleet.wait()
        os.close(main)
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in text.replace("\r", "").splitlines() if line.strip()]
    assert "\x1b" not in "".join(lines)  # the output contains colours, but nothing that moves or hides the cursor
    assert {line.split()[0] for line in lines} == {"local-0", "local-1", "local-2"}, lines
    assert sum("starts" in line for line in lines) == 3
    assert sum("joined" in line for line in lines) == 3


class Heard:
    """A view without a terminal that records its events."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._view = _View()

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        self._view(event)


def broken_reward(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
    raise KeyError(f"no answer {HOSTILE}")


def test_a_failing_reward_is_reported_once_with_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    from test_member import FakeGenerator, publish

    store, engine, heard = MemoryStore("memory://output"), FakeGenerator(), Heard()
    publisher = Publisher(store)
    engine.version = publish(publisher, 0)
    member = Member(store, engine, RewardScorer([broken_reward]), name="m", poll=0.01, patience=0.0, on_event=heard)
    stop = threading.Event()
    with Coordinator(store, epoch=publisher.epoch, options=FleetOptions(poll_seconds=0.01)) as fleet:
        fleet.open_round([[{"prompt": "a"}]] * 3, for_step=1, sampling=Sampling(samples=1, max_tokens=4))
        with pytest.raises(Exception, match="broken_reward"):
            member.run(stop)
    publisher.close()
    failures = [event for event in heard.events if event.name == "work-failed"]
    assert len(failures) == 3
    assert {event.fields["member"] for event in heard.events} == {"m"}
    assert "in broken_reward\n" in str(failures[0].fields["traceback"])
    assert not [event for event in heard.events if event.name == "member-retrying"]
    notices = capsys.readouterr().err
    assert notices.count("Traceback (most recent call last)") == 1
    assert notices.count("will try again") == 1
    assert "in broken_reward" in notices
    assert not re.search("[\x1b\x07\u202e]", notices)


def test_the_same_failure_is_reported_once_until_a_task_succeeds(capsys: pytest.CaptureFixture[str]) -> None:
    def failed(final: bool) -> Event:
        return Event("work-failed", {"reason": "it broke", "traceback": "Traceback", "final": final})

    swapped = Event("swapped", {"updates": 2, "step": 1, "pause_seconds": 0.0})
    view = _View()
    for event in (failed(False), swapped, failed(False), swapped, failed(True), Event("left", {"member": "m"}), swapped):
        view(event)
    printed, notices = capsys.readouterr()
    first, second = notices.splitlines()
    assert (first[10:], second) == ("will try again: it broke", "    Traceback")
    assert printed.splitlines()[-1].endswith("left after 0 results")
    view = _View()
    for event in (failed(False), Event("rollout-uploaded", {}), failed(True)):
        view(event)
    assert re.findall("will try again|failed", capsys.readouterr().err) == ["will try again", "failed"]


def wants_a_solution(prompts: list[Any], completions: list[Any], solution: list[Any], **columns: Any) -> list[float]:
    return [0.0 for _ in completions]


def test_a_reward_that_wants_a_missing_column_ends_the_member_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    from test_member import FakeGenerator, publish

    store, engine, heard = MemoryStore("memory://column"), FakeGenerator(), Heard()
    publisher = Publisher(store)
    engine.version = publish(publisher, 0)
    member = Member(store, engine, RewardScorer([wants_a_solution]), name="m", poll=0.01, patience=0.0, on_event=heard)
    with Coordinator(store, epoch=publisher.epoch, options=FleetOptions(poll_seconds=0.01)) as fleet:
        fleet.open_round([[{"prompt": "a"}]] * 3, for_step=1, sampling=Sampling(samples=1, max_tokens=4))
        with pytest.raises(UnusableReward, match="'solution'"):
            member.run(threading.Event())
    publisher.close()
    assert [event.fields["final"] for event in heard.events if event.name == "work-failed"] == [True]
    assert "will try again" not in capsys.readouterr().err


def test_a_member_that_comes_after_the_end_says_that_the_run_is_over(capsys: pytest.CaptureFixture[str]) -> None:
    from test_member import FakeGenerator, publish

    store, engine, heard = MemoryStore("memory://over"), FakeGenerator(), Heard()
    with Publisher(store) as publisher:
        engine.version = publish(publisher, 7)
        with Coordinator(store, epoch=publisher.epoch, options=FleetOptions(poll_seconds=0.01)) as fleet:
            fleet.stop()
    Member(store, engine, RewardScorer([broken_reward]), name="late", poll=0.01, patience=0.0, on_event=heard).run(threading.Event())
    lines = [line[10:] for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "joined as late"
    assert re.fullmatch(r"the trainer ended the run at step \d+, so this member leaves", lines[1])
    assert lines[2:] == ["left after 0 results"]
