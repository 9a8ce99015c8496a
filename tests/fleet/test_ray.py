"""Members run on a real Ray cluster of two nodes, both on this machine."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from member_nursery import HERE, wait_until
from small_run import SmallRun
from typer.testing import CliRunner

from deltawire.cli import app
from deltawire.events import Event
from deltawire.fleet.supervision import PermanentFailure
from deltawire.rl import ray_members
from deltawire.rl.member import MemberOptions
from deltawire.rl.ray_members import RayCluster
from deltawire.store import open_store

sys.path.insert(0, str(HERE.parent / "docs"))

from markdown_blocks import blocks_run_by

pytestmark = [
    pytest.mark.filterwarnings("default"),  # deltawire does not cause Ray's warnings
    # does not skip the whole module, because a run without any test fails
    pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed"),
]

HEAD = {"num_cpus": 1, "include_dashboard": False, "_system_config": {"enable_worker_prestart": False}}
LINES = 5000
"""The number of lines that `talking_rewards` prints. Ray does not transfer that many at once."""
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)]), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray import cluster_utils

    made = cluster_utils.Cluster(initialize_head=True, head_node_args=HEAD)
    made.add_node(num_cpus=1)
    made.wait_for_nodes()
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def connected(cluster: Any) -> Iterator[Any]:
    """Connect this process to the cluster."""
    import ray

    ray.init(cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()


@pytest.fixture(autouse=True)
def _no_remarks_about_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no member say that it waits for a node just because this machine is busy."""
    monkeypatch.setattr(ray_members, "_PATIENCE", 1800.0)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[SmallRun]:
    with open_store(tmp_path / "store") as store:
        made = SmallRun(tmp_path, store)
        yield made
        made.close()


def talking(folder: Path, name: str) -> MemberOptions:
    return MemberOptions(str(folder / "store"), "transformers", ("talking_rewards:reward",), name)


@contextmanager
def fleet_command(log: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "deltawire.cli", "fleet", *arguments]
    with log.open("wb") as output, log.with_suffix(".errors").open("wb") as errors:
        fleet = subprocess.Popen(command, env={**os.environ, **ENVIRONMENT}, stdout=output, stderr=errors)
    try:
        yield fleet
    finally:
        fleet.kill()
        fleet.wait()


def test_a_fleet_reports_a_lost_node_and_continues(tmp_path: Path, run: SmallRun, cluster: Any) -> None:
    """Each node has room for one member, so the two members are on two nodes."""
    log = tmp_path / "fleet.log"
    arguments = ["--ray", "2", "--ray-address", cluster.address, "--json", "--poll", "0.05", "--name", "ray"]
    arguments += ["--from", str(tmp_path / "store"), "--env", "rewards_for_tests:length"]
    arguments += [part for name in ENVIRONMENT for part in ("--pass-env", name)]

    def events(name: str) -> list[dict[str, Any]]:
        lines = log.read_text().split("\n")[:-1]  # the last line may be incomplete
        return [event for event in map(json.loads, lines) if name in ("", event["event"])]

    def said() -> str:
        return log.read_text() + log.with_suffix(".errors").read_text()

    with fleet_command(log, *arguments) as fleet:
        run.train()
        wait_until(lambda: {event["member"] for event in events("joined")} == {"ray-0", "ray-1"}, said)
        second = next(node for node in cluster.list_all_nodes() if node is not cluster.head_node)
        cluster.remove_node(second, allow_graceful=False)
        wait_until(lambda: events("member-died"), said)
        run.train()  # the remaining member does the work
        cluster.add_node(num_cpus=1)
        wait_until(lambda: len(events("joined")) == 3, said)
        run.train()
        run.check()
        run.fleet.stop()
        assert fleet.wait(120) == 0, said()
    (lost,) = {event["member"] for event in events("member-died")}
    assert [event["member"] for event in events("joined")].count(lost) == 2
    assert {event["member"] for event in events("")} == {"ray-0", "ray-1"}
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", event["time"]) for event in events(""))
    assert {"swapped", "generated", "rollout-uploaded", "run-over"} <= {event["event"] for event in events("")}
    for name in ("left", "member-left"):  # the last event of a member, and the fleet's event about it
        assert sorted(event["member"] for event in events(name)) == ["ray-0", "ray-1"]


def test_members_on_ray_are_reported_like_members_of_this_machine(tmp_path: Path, connected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--from", str(tmp_path / "store"), "--env", "talking_rewards:reward", "--name", "m"]
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    here = CliRunner().invoke(app, ["fleet", "1", *arguments, "--json"])
    passing = [part for name in ENVIRONMENT for part in ("--pass-env", name)]
    there = CliRunner().invoke(app, ["fleet", "--ray", "1", *arguments, *passing, "--json"])
    assert (here.exit_code, there.exit_code) == (1, 1), there.output
    assert len(shapes(there.stdout, "stdout")) > LINES
    assert shapes(there.stdout, "stdout") == shapes(here.stdout, "stdout")
    assert shapes(there.stdout, "stderr") == shapes(here.stdout, "stderr")
    assert any("UserWarning: m-0 warns" in line for _, line in shapes(there.stdout, "stderr"))
    assert [kind for kind, _ in shapes(there.stdout, "stdout")][-3:] == ["failed", "member-died", "member-given-up"]

    for_people = CliRunner().invoke(app, ["fleet", "--ray", "1", *arguments, *passing])
    assert for_people.exit_code == 1
    lines = for_people.output.splitlines()
    assert {line.split()[0] for line in lines} == {"m-0"}
    assert sum("says line" in line for line in lines) == LINES
    assert "m-0  error: " in for_people.stderr


def shapes(output: str, stream: str) -> list[tuple[str, str]]:
    """Return what two runs have in common of the events of one stream of the member, or of the command itself."""
    events = [json.loads(line) for line in output.splitlines()]
    assert all(event["member"] == "m-0" and event["time"] for event in events)
    found = [event for event in events if event.get("stream", "stdout") == stream]
    return [(event["event"], re.sub(r"\d{2,}$", "N", str(event.get("line", event.get("reason"))))) for event in found]


def test_members_are_heard_to_their_end_whatever_becomes_of_others(tmp_path: Path, connected: Any) -> None:
    on_ray = RayCluster(cpus=0, environment=ENVIRONMENT)
    told: list[Event] = []
    members = {name: on_ray.start(talking(tmp_path, name), on_event=told.append) for name in ("killed", "talks", "stays")}
    try:
        wait_until(lambda: members["killed"].ending() is not None, lambda: str(told))
        assert members["killed"].ending() == "killed by SIGKILL"
        wait_until(lambda: members["talks"].ending() is not None, lambda: str(told[-10:]))
        assert isinstance(members["talks"].ending(), PermanentFailure)
        wait_until(lambda: (members["stays"].ending(), "stays" in {event.fields["member"] for event in told})[1], lambda: str(told[-10:]))
        assert members["stays"].ending() is None
    finally:
        members["stays"].kill()
    said: dict[str, list[str]] = {name: [] for name in members}
    for event in told:
        if event.name == "output":
            said[str(event.fields["member"])].append(str(event.fields["line"]))
    assert len(said["killed"]) == len(said["stays"]) == 1
    assert [line for line in said["talks"] if "says line" in line] == [
        f"talks says line {number} of many lines, and all of them are worth reading" for number in range(LINES)
    ]
    (failed,) = [event for event in told if event.name == "failed"]
    assert (failed.fields["member"], failed.fields["error"]) == ("talks", "UnusableReward")
    assert "talks cannot be imported" in str(failed.fields["reason"])
    pid = int(said["stays"][0].split()[-1])
    wait_until(lambda: not is_alive(pid), "the process of a member that is killed ends")


def is_alive(pid: int) -> bool:
    try:
        return "stays" in Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return False


def test_a_lost_actor_is_reported(tmp_path: Path, connected: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a listener, every line is printed after the member's name."""
    on_ray = RayCluster(cpus=0, environment=ENVIRONMENT)
    member = on_ray.start(talking(tmp_path, "stays-too"))
    said: list[str] = []

    def hear(condition: Callable[[], object]) -> bool:
        ended = member.ending()
        captured = capsys.readouterr()
        said.extend([*captured.out.splitlines(), *captured.err.splitlines()])
        return ended is not None or bool(condition())

    wait_until(lambda: hear(lambda: said), lambda: str(said))
    assert re.fullmatch(r"stays-too  stays-too is process \d+", said[0])
    member.kill()
    wait_until(lambda: hear(lambda: False), lambda: str(said))
    assert "ActorDiedError" in str(member.ending())
    assert any(line.startswith("stays-too  ActorDiedError") for line in said)


def test_a_member_that_no_node_has_room_for_says_so_and_leaves_at_once(tmp_path: Path, connected: Any) -> None:
    on_ray = RayCluster(cpus=0, resources={"unicorn": 1}, environment=ENVIRONMENT)
    told: list[Event] = []
    member = on_ray.start(talking(tmp_path, "nowhere"), on_event=told.append)
    assert member.ending() is None
    member._began -= 3600
    for _ in range(2):
        assert member.ending() is None
    (event,) = told
    assert (event.name, event.fields["member"]) == ("waiting", "nowhere")
    assert "1 unicorn" in str(event.fields["reason"])
    member.leave()
    assert member.ending() == ""


def test_the_command_and_the_program_on_the_page_of_fleets_run(
    tmp_path: Path, run: SmallRun, connected: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run.fleet.stop()  # the run is over, so members leave as soon as they have joined
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    command, program = (block.text for block in blocks_run_by("tests/fleet/test_ray.py", "docs/fleet.md"))
    here = {"s3://bucket/run-7": str(tmp_path / "store"), "my_task:reward": "rewards_for_tests:length"}
    passing = " ".join(f"--pass-env {name}" for name in ENVIRONMENT)
    deltawire, *arguments = shlex.split(
        replaced(command, {**here, "--ray 64": f"--ray 1 {passing}", "--gpus 1": "--gpus 0"}), comments=True
    )
    done = CliRunner().invoke(app, arguments)
    assert (deltawire, done.exit_code) == ("deltawire", 0), done.output
    exec(replaced(program, {**here, "range(64)": "range(1)", "gpus=1": f"cpus=0, environment={ENVIRONMENT}"}), {})
    printed = capsys.readouterr().out
    assert "name='joined'" in printed
    assert "name='member-left'" in printed


def replaced(text: str, substitutes: dict[str, str]) -> str:
    for written, meant in substitutes.items():
        assert written in text, f"the page does not say {written} any more"
        text = text.replace(written, meant)
    return text
