"""Members on a real Ray cluster of two nodes, both on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from member_nursery import HERE, wait_until
from small_run import SmallRun

from deltawire.events import Event
from deltawire.fleet.supervision import Supervisor
from deltawire.rl.member import MemberOptions
from deltawire.rl.ray_members import RayCluster, RayMember
from deltawire.store import open_store

pytestmark = [
    pytest.mark.filterwarnings("default"),  # what Ray warns of is not ours
    pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed"),  # not the whole module: a run without a test fails
]

ENVIRONMENT = {"PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)]), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray import cluster_utils

    made = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    made.add_node(num_cpus=1)
    made.wait_for_nodes()
    yield made
    made.shutdown()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[SmallRun]:
    with open_store(tmp_path / "store") as store:
        made = SmallRun(tmp_path, store)
        yield made
        made.close()


def test_members_are_spread_over_nodes_and_started_again_elsewhere_when_one_is_lost(tmp_path: Path, run: SmallRun, cluster: Any) -> None:
    on_ray = RayCluster(cluster.address, environment=ENVIRONMENT)
    started: dict[str, list[RayMember]] = {"ray-0": [], "ray-1": []}
    events: list[Event] = []

    def start(name: str) -> RayMember:
        options = MemberOptions(str(tmp_path / "store"), "transformers", ("rewards_for_tests:length",), name, poll=0.05)
        started[name].append(on_ray.start(options))
        return started[name][-1]

    supervisor = Supervisor(list(started), start, pause=0.1, on_event=events.append)
    with ThreadPoolExecutor(1) as pool:
        supervising = pool.submit(supervisor.run, threading.Event())
        run.train()
        nodes = {name: members[0].node() for name, members in started.items()}
        assert len(set(nodes.values())) == 2
        second = next(node for node in cluster.list_all_nodes() if node is not cluster.head_node)
        lost = next(name for name, node in nodes.items() if node == second.node_id)
        cluster.remove_node(second, allow_graceful=False)
        wait_until(lambda: any(event.name == "member-died" for event in events), "the loss is noticed")
        run.train()  # by the one that is left
        cluster.add_node(num_cpus=1)
        wait_until(lambda: len(started[lost]) > 1, "another is started")
        assert started[lost][-1].node() not in nodes.values()
        run.train()
        run.check()
        run.fleet.stop()
        assert supervising.result(120)
    assert {event.fields["member"] for event in events if event.name == "member-died"} == {lost}
    on_ray.close()


def test_the_command_runs_members_on_the_cluster_until_the_run_is_over(tmp_path: Path, run: SmallRun, cluster: Any) -> None:
    log = tmp_path / "fleet.log"
    command = [sys.executable, "-m", "deltawire.cli", "fleet", "--ray", "2", "--ray-address", cluster.address, "--json", "--poll", "0.05"]
    command += ["--from", str(tmp_path / "store"), "--env", "rewards_for_tests:length", "--name", "told"]
    command += [part for name in ENVIRONMENT for part in ("--pass-env", name)]
    with log.open("wb") as output:
        fleet = subprocess.Popen(command, env={**os.environ, **ENVIRONMENT}, stdout=output, stderr=output)
    try:
        run.train()
        wait_until(lambda: (run.open(run.step + 1), run.fleet.poll(), set(run.members()) == {"told-0", "told-1"})[2], log.read_text)
        run.train()
        run.check()
        run.fleet.stop()
        assert fleet.wait(120) == 0, log.read_text()
    finally:
        fleet.kill()
        fleet.wait()
    told = [json.loads(line) for line in log.read_text().splitlines() if line.startswith('{"event')]
    assert sorted(each["member"] for each in told if each["event"] == "member-left") == ["told-0", "told-1"]
