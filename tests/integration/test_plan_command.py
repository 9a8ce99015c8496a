"""`deltawire plan`: the table, JSON, and refusals."""

from __future__ import annotations

import json
import xml.etree.ElementTree as xml
from pathlib import Path

import pytest
from test_cli import fail, run, succeed

EXAMPLE = ("plan", "--params", "1T", "--dtype", "fp8", "--density", "0.11%", "--regions", 4, "--link", "1Gbit/80ms")


@pytest.mark.parametrize("columns", [None, 80])
def test_the_table_fits_80_columns(columns: int | None) -> None:
    done = run(*EXAMPLE, "--members", 10_000, columns=columns)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "1.00 TB of weights, 0.11% changed; 10,000 members in 4 regions"
    for name in ("full weights", "XOR + zstd-1", "deltawire ", "deltawire, no relays"):
        assert [line for line in lines if line.startswith(name)]
    assert "First limit" in done.stdout
    assert [line for line in lines if line.startswith("deltawire *")]
    assert "slower and cost more than the table says" in " ".join(done.stdout.split())


def test_the_page_shows_what_the_command_prints() -> None:
    page = (Path(__file__).parents[2] / "docs" / "scale.md").read_text(encoding="utf-8")
    assert f"```text\n{run(*EXAMPLE).stdout}```" in page


def test_json_has_what_the_table_has() -> None:
    found = succeed(*EXAMPLE, "--members", 8)
    methods = {method["name"]: method for method in found["methods"]}
    assert methods["deltawire"]["bytes_per_step"] < methods["XOR + zstd-1"]["bytes_per_step"] < methods["full weights"]["bytes_per_step"]
    assert found["fleet"]["gpus_per_member"] == 16
    assert [region["members"] for region in found["network"]["regions"]] == [2] * 4


def test_fireworks_figures_through_options() -> None:
    found = succeed("plan", "--full", "1024GiB", "--delta", "20.3GiB", "--full-every", 25, "--steps", 50, "--members", 2)
    assert {method["name"]: method for method in found["methods"]}["deltawire"]["saved"] == pytest.approx(0.941, abs=0.001)


def test_one_region_may_have_another_link() -> None:
    found = succeed("plan", "--params", "8B", "--regions", 3, "--members", 7, "--link", "r2=250Mbit/150ms", "--link", "500Mbit/s/30ms")
    assert [region["link"]["rate"] for region in found["network"]["regions"]] == [5e8, 2.5e8, 5e8]
    assert [region["members"] for region in found["network"]["regions"]] == [3, 2, 2]
    assert found["methods"][0]["behind_seconds"]["worst_region"] == "r2"


def test_stores_may_answer_at_another_speed() -> None:
    usual, at_once = (succeed("plan", "--params", "8B", *options) for options in ((), ("--server-latency", "0ms")))
    assert [found["network"]["model"]["server_seconds"] for found in (usual, at_once)] == [0.02, 0]
    slower, faster = (found["methods"][0]["regions"][0]["link_seconds"] for found in (usual, at_once))
    assert faster < slower


def test_a_plan_from_a_chain_uses_its_own_sizes(published: Path) -> None:
    versions = succeed("log", published)["versions"]
    deltas = [version["bytes"] for version in versions if version["kind"] == "delta"]
    found = succeed("plan", "--from", published, "--members", 2, "--steps", 10)
    assert found["workload"]["state_bytes"] == versions[0]["state_bytes"]
    assert found["workload"]["delta_bytes"] == pytest.approx(sum(deltas) / len(deltas))


def test_a_chain_without_deltas_cannot_be_planned_from(checkpoints: list[Path], tmp_path: Path) -> None:
    fail("plan", "--from", tmp_path / "nothing", kind="NoChain")
    succeed("publish", checkpoints[0], tmp_path / "chain")
    assert "is a delta" in fail("plan", "--from", tmp_path / "chain", kind="UnusablePlan")


def test_the_plot_is_an_svg_file_and_replaces_none(tmp_path: Path) -> None:
    file = tmp_path / "plan.svg"
    succeed("plan", "--params", "8B", "--members", 2, "--plot", file)
    root = xml.fromstring(file.read_text(encoding="utf-8"))
    assert root.tag.endswith("svg")
    texts = "".join(root.itertext())
    assert "full weights" in texts
    assert "74.1 MB" in texts
    file.write_text("mine")
    assert run("plan", "--params", "8B", "--plot", file).returncode == 2
    assert file.read_text() == "mine"


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--params", "1e99"),
        ("--params", "8B", "--full", "16GB"),
        ("--params", "8B", "--delta", "1MB", "--density", "1%"),
        ("--params", "8B", "--link", "0/0"),
        ("--params", "8B", "--link", "r9=1Gbit/1ms"),
        ("--params", "8B", "--density", "200%"),
        ("--params", "8B", "--dtype", "fp7"),
        ("--params", "8B", "--bits", "nan"),
        ("--params", "8B", "--streams", "0"),
        ("--params", "8B", "--streams", "65"),
        ("--params", "8B", "--regions", 0),
        ("--params", "8B", "--regions", 5, "--members", 4),
        ("--params", "8B", "--step", "0s"),
        ("--params", "8B", "--rate", "inf"),
        ("--params", "8B", "--egress", "-1"),
        ("--params", "8B", "--in-bf16", "9B"),
        ("--params", "8B", "--server-latency", "20"),
        ("--params", "8B", "--server-latency", "2min"),
    ],
)
def test_impossible_numbers_are_wrong_usage(options: tuple[object, ...]) -> None:
    done = run("plan", *options, "--json")
    assert done.returncode == 2, done.stdout + done.stderr
    assert json.loads(done.stdout)["error"]["type"] == "UsageError"
    assert "Traceback" not in done.stderr
