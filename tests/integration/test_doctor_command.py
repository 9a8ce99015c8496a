"""`deltawire doctor` prints what is wrong and what to do, within 80 columns, and its exit code says whether anything is."""

from __future__ import annotations

from pathlib import Path

from chain_commands import data_of
from test_cli import run, succeed


def files_in(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_sound_chain_is_well_and_nothing_is_left_behind(chain: Path) -> None:
    before = files_in(chain)
    for options in ([], ["--read-only"], ["--test-bytes", "0"]):
        done = run("doctor", chain, *options, columns=80)
        assert (done.returncode, done.stderr) == (0, "")
        assert "No check found a problem." in done.stdout
        assert max(len(line) for line in done.stdout.splitlines() if str(chain) not in line) <= 80
    answer = succeed("doctor", chain)
    assert answer["ok"]
    assert answer["measured"]["version"] == 3
    assert {"check", "level", "what", "remedy"} == answer["findings"][0].keys()
    assert files_in(chain) == before


def test_a_damaged_chain_is_reported_with_advice(chain: Path) -> None:
    lost = data_of(chain, 5)[0]
    lost.unlink()
    done = run("doctor", chain, columns=80)
    assert (done.returncode, done.stderr) == (1, "")
    text = " ".join(done.stdout.split())
    assert "wrong data: no new reader can get to the newest version" in text
    assert f"What to do: `deltawire verify --deep {chain}` names what is damaged." in text
    assert lost.name in done.stdout
    assert "1 thing is wrong." in text
    long = {line for line in done.stdout.splitlines() if len(line) > 80}
    assert all(" " not in line.strip() for line in long), "a line is long only if a single word does not fit"


def test_wrong_usage(chain: Path) -> None:
    for arguments in (["s3:/bucket"], [chain, "--engine", "localhost"], [chain, "--test-bytes", "-1"]):
        assert run("doctor", *arguments).returncode == 2
