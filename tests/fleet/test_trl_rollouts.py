"""TRL's real AsyncGRPO trains on results of our members, with only the store between them: no vLLM server and no address."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from forked_python import ForkedPopen, forked_run
from member_nursery import HERE, MemberNursery, wait_until

from deltawire.format.records.trainer_records import Board

sys.path.insert(0, str(HERE.parent / "docs"))

from markdown_blocks import blocks_run_by

for library in ("trl", "vllm", "datasets"):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"TRL's AsyncGRPO needs {library} to be installed", allow_module_level=True)

STEPS, GROUPS, SAMPLES = 4, 4, 2
EXAMPLE = HERE.parents[1] / "examples" / "trl_vllm_over_bucket"


@contextlib.contextmanager
def training(model: Path, store: Path, steps: int, batch: int) -> Iterator[subprocess.Popen[str]]:
    command = [HERE / "train_with_trl.py", model, store, steps, batch]
    process = ForkedPopen("trl", command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def takes_members(store: Path) -> bool:
    """Return whether there is a trainer whose board does not say that the run is over. A member that joins earlier would leave again."""
    board = store / "fleet" / "board.json"
    return board.exists() and not Board.parse(board.read_bytes()).stop


def lines(output: str, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in output.splitlines() if line.startswith('{"')]
    return [line for line in found if kind in line]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trl") / "model"
    assert forked_run("trl", [EXAMPLE / "tiny_model.py", folder]).returncode == 0
    return folder


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MemberNursery]:
    with MemberNursery(tmp_path_factory.mktemp("members")) as made:
        yield made


def test_async_grpo_trains_from_the_fleet_and_again_after_a_restart(tmp_path: Path, model: Path, nursery: MemberNursery) -> None:
    store = tmp_path / "store"
    seen: set[tuple[int, int]] = set()
    before: set[int] = set()
    for run in range(2):
        with training(model, store, STEPS, GROUPS * SAMPLES) as trainer:
            wait_until(lambda: takes_members(store) or trainer.poll() is not None, "a trainer")
            member = nursery.start(f"m{run}", "--from", str(store), "--env", "rewards_for_tests:length")
            output, errors = trainer.communicate(timeout=600)
        assert trainer.returncode == 0, errors[-4000:]
        steps = lines(output, "ratio")
        assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
        assert [line["ratio"] for line in steps] == pytest.approx([1.0] * STEPS, abs=0.1)
        assert all(line["sample/staleness_max"] <= 1 for line in steps)
        assert not any(line["sample/dropped_stale_total"] for line in steps)
        assert all(1 <= line["reward"] <= 12 for line in steps)
        (published,) = [line["published"] for line in lines(output, "published")]
        assert len(published) == STEPS + 1
        batches = lines(output, "batch")
        assert len(batches) >= STEPS
        for batch in batches:
            assert len(batch["made"]) == GROUPS
            for number, task, _, versions in batch["made"]:
                assert (number, task) not in seen
                seen.add((number, task))
                assert set(versions) <= {*published, *before}
        before = {published[-1]}  # a member of the next run may begin with this version, since a sample may be one version old
        assert member.ended() == 0, member.log()  # the member was told to leave when the training was over


def test_the_program_on_the_page_of_fleets_trains(tmp_path: Path, model: Path, nursery: MemberNursery) -> None:
    (block,) = blocks_run_by("tests/fleet/test_trl_rollouts.py", "docs/fleet.md")
    on_a_cpu = 'max_staleness=1, dtype="bfloat16", use_cpu=True, bf16=False, report_to=[], save_strategy="no", gradient_checkpointing=False'
    smaller = {
        "s3://bucket/": f"{tmp_path}/",
        '"model/"': repr(str(model)),
        "max_steps=100": "max_steps=2",
        "batch_size=64": "batch_size=4",
        "groups=8, samples=8, max_tokens=512": "groups=2, samples=2, max_tokens=4",
        "num_generations=8": "num_generations=2",
        "max_completion_length=512": "max_completion_length=4",
        "max_staleness=1": on_a_cpu,
    }
    program = block.text
    for written, meant in smaller.items():
        assert written in program, f"the page does not say {written} any more"
        program = program.replace(written, meant)
    script = tmp_path / "from_the_page.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(EXAMPLE)!r})\nimport on_cpu\non_cpu.replace_what_needs_a_gpu()\n{program}")
    store = tmp_path / "run-7"
    process = ForkedPopen("trl", [script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    try:
        wait_until(lambda: takes_members(store) or process.poll() is not None, "a trainer")
        member = nursery.start("m", "--from", str(store), "--env", "rewards_for_tests:length")
        _, errors = process.communicate(timeout=600)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, errors[-4000:]
    assert member.ended() == 0, member.log()


def test_a_trainer_that_wants_more_samples_than_a_round_has_is_told_so(tmp_path: Path, model: Path, nursery: MemberNursery) -> None:
    store = tmp_path / "store"
    with training(model, store, 2, GROUPS * SAMPLES * 4) as trainer:
        member = nursery.start("m", "--from", str(store), "--env", "rewards_for_tests:length")
        _, errors = trainer.communicate(timeout=600)
    assert trainer.returncode == 1
    assert "samples between two syncs" in errors
    assert member.ended() == 0, member.log()
