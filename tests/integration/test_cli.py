"""Run the commands for delta files as real processes on real safetensors files."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from forked_cli import run_forked
from numpy.typing import NDArray
from safetensors import deserialize
from safetensors.numpy import save_file

from deltawire.dtypes import dtype_named

Tensors = dict[str, NDArray[Any]]
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


def run(*arguments: object, columns: int | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command in a process that is forked after the imports, because these tests run hundreds of commands."""
    return run_forked([str(argument) for argument in arguments], environment(columns))


def run_python(interpreter_arguments: list[str], *arguments: object, columns: int | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *interpreter_arguments, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment(columns), check=False)


def environment(columns: int | None = None) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "FORCE_COLOR", "TERM")}
    return {**clean, "PYTHONUTF8": "1"} | ({"COLUMNS": str(columns)} if columns else {})


def succeed(*arguments: object) -> dict[str, Any]:
    """Run with --json and return the object. Stdout must hold nothing else, and stderr must be empty."""
    done = run(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def fail(*arguments: object, kind: str) -> str:
    """Run a command that must fail, with and without --json.

    It must print one red line to stderr, exit with code 1, and print the error as JSON to stdout only with --json.
    """
    plain, asked = run(*arguments), run(*arguments, "--json")
    for done in (plain, asked):
        assert done.returncode == 1, done.stdout + done.stderr
        assert re.fullmatch(r"error: .+\n", done.stderr), done.stderr
    assert plain.stdout == ""
    error = json.loads(asked.stdout)["error"]
    assert error["type"] == kind
    message: str = error["message"]
    return message


def model(seed: int = 0) -> Tensors:
    rng = np.random.default_rng(seed)
    tensors: Tensors = {
        f"model.layers.{layer}.self_attn.q_proj.weight": rng.standard_normal((64, 96)).astype(ml_dtypes.bfloat16) for layer in range(3)
    }
    tensors["lm_head.weight"] = rng.standard_normal((200, 64)).astype(ml_dtypes.bfloat16)
    tensors["scale"] = rng.standard_normal((7, 5)).astype(np.float32)
    tensors["quantized"] = rng.standard_normal(33).astype(ml_dtypes.float8_e4m3fn)
    tensors["step"] = np.array(12, np.int64)
    tensors["nothing"] = np.zeros((0, 4), np.float16)
    return tensors


def updated(tensors: Tensors, seed: int = 1) -> Tensors:
    rng = np.random.default_rng(seed)
    result = {name: array.copy() for name, array in tensors.items()}
    for array in result.values():
        bits = array.reshape(-1).view(f"u{array.dtype.itemsize}")
        bits[rng.random(bits.shape) < 0.05] += 1
    result["step"] = np.array(13, np.int64)
    return result


def save_sharded(directory: Path, shards: dict[str, Tensors]) -> None:
    directory.mkdir()
    for file_name, tensors in shards.items():
        save_file(tensors, directory / file_name, metadata={"format": "pt"})
    weight_map = {name: file_name for file_name, tensors in shards.items() for name in tensors}
    total = sum(array.nbytes for tensors in shards.values() for array in tensors.values())
    (directory / INDEX).write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n"
    )
    (directory / "config.json").write_text("{}")


def halves(tensors: Tensors) -> dict[str, Tensors]:
    names = sorted(tensors)
    return {FIRST: {name: tensors[name] for name in names[:4]}, SECOND: {name: tensors[name] for name in names[4:]}}


def load(path: Path) -> Tensors:
    """Return the tensors that the safetensors library finds in a file.

    Its NumPy part cannot load fp8, so this function makes the arrays.
    """
    return {
        name: np.frombuffer(found["data"], dtype_named(found["dtype"]).numpy).reshape(found["shape"])
        for name, found in deserialize(path.read_bytes())  # type: ignore[no-untyped-call]
    }


def load_directory(directory: Path) -> Tensors:
    weight_map = json.loads((directory / INDEX).read_text())["weight_map"]
    found: Tensors = {}
    for file_name in set(weight_map.values()):
        found |= load(directory / file_name)
    assert found.keys() == weight_map.keys()
    return found


def assert_same(found: Tensors, wanted: Tensors) -> None:
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        assert np.array_equal(found[name].reshape(-1).view(np.uint8), array.reshape(-1).view(np.uint8)), name


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    old, new = tmp_path / "old.safetensors", tmp_path / "new.safetensors"
    save_file(model(), old, metadata={"format": "pt"})
    save_file(updated(model()), new, metadata={"format": "pt"})
    return old, new


@pytest.fixture
def delta(files: tuple[Path, Path]) -> Path:
    path = files[0].with_name("step.delta")
    succeed("diff", *files, "-o", path)
    return path


def test_a_delta_of_two_files_turns_one_into_the_other_byte_for_byte(files: tuple[Path, Path], tmp_path: Path) -> None:
    old, new = files
    made = succeed("diff", old, new, "-o", tmp_path / "step.delta")
    applied = succeed("apply", old, tmp_path / "step.delta", "-o", tmp_path / "out.safetensors")
    assert (tmp_path / "out.safetensors").read_bytes() == new.read_bytes()
    wanted = updated(model())
    changed = sum(int((wanted[name].view(np.uint8) != array.view(np.uint8)).sum() > 0) for name, array in model().items() if array.ndim)
    assert made["tensors_changed"] == changed + 1
    assert made["bytes"] == (tmp_path / "step.delta").stat().st_size
    assert made["weight_bytes"] == sum(array.nbytes for array in wanted.values())
    assert made["elements"] == sum(array.size for array in wanted.values())
    assert made["density"] == made["changed"] / made["elements"]
    assert (applied["before"], applied["after"]) == (made["before"], made["after"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new.safetensors", "old.safetensors", "out.safetensors", "step.delta"]


def test_sharded_directories_keep_their_layout(tmp_path: Path) -> None:
    save_sharded(tmp_path / "old", halves(model()))
    save_sharded(tmp_path / "new", halves(updated(model())))
    succeed("diff", tmp_path / "old", tmp_path / "new", "-o", tmp_path / "step.delta", "--threads", 2)
    succeed("apply", tmp_path / "old", tmp_path / "step.delta", "-o", tmp_path / "out", "--threads", 1)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == {
        path.name: path.read_bytes() for path in (tmp_path / "new").iterdir()
    }


def test_a_directory_and_a_file_of_the_same_tensors_are_the_same_state(files: tuple[Path, Path], delta: Path, tmp_path: Path) -> None:
    save_sharded(tmp_path / "old", halves(model()))
    succeed("apply", tmp_path / "old", delta, "-o", tmp_path / "out")
    assert_same(load_directory(tmp_path / "out"), load(files[1]))


def test_tensors_that_appear_vanish_and_change_shape_are_carried(tmp_path: Path) -> None:
    old = model()
    new = updated(old)
    del new["quantized"]
    new["scale"] = np.arange(12, dtype=np.float32).reshape(3, 4)
    new["lm_head.weight"] = new["lm_head.weight"].astype(np.float32)
    new["added.weight"] = np.full((3, 5), 1.5, ml_dtypes.bfloat16)
    new["added.empty"] = np.zeros((0, 9), np.int8)
    save_sharded(tmp_path / "old", halves(old))
    save_file(new, tmp_path / "new.safetensors")
    succeed("diff", tmp_path / "old", tmp_path / "new.safetensors", "-o", tmp_path / "step.delta")
    applied = succeed("apply", tmp_path / "old", tmp_path / "step.delta", "-o", tmp_path / "out")
    assert applied["added"] == ["added.empty", "added.weight", "lm_head.weight", "scale"]
    assert applied["removed"] == ["lm_head.weight", "quantized", "scale"]
    assert_same(load_directory(tmp_path / "out"), new)
    total = json.loads((tmp_path / "out" / INDEX).read_text())["metadata"]["total_size"]
    assert total == sum(array.nbytes for array in new.values())
    shown = succeed("inspect", tmp_path / "step.delta")
    assert shown["added"]["added.weight"] == {"dtype": "BF16", "shape": [3, 5]}
    assert shown["removed"] == applied["removed"]


def test_equal_checkpoints_give_a_delta_that_changes_nothing(files: tuple[Path, Path], tmp_path: Path) -> None:
    made = succeed("diff", files[0], files[0], "-o", tmp_path / "none.delta")
    assert (made["changed"], made["tensors_changed"], made["bits_per_change"]) == (0, 0, None)
    succeed("apply", files[0], tmp_path / "none.delta", "-o", tmp_path / "out.safetensors")
    assert (tmp_path / "out.safetensors").read_bytes() == files[0].read_bytes()
    assert run("inspect", tmp_path / "none.delta").returncode == 0
    assert run("diff", files[0], files[0], "-o", tmp_path / "again.delta").returncode == 0


def test_diff_tells_what_a_reader_wants_to_know(files: tuple[Path, Path], tmp_path: Path) -> None:
    done = run("diff", *files, "-o", tmp_path / "step.delta")
    assert done.returncode == 0
    assert done.stderr == ""
    for pattern in (
        r"changed weights +[\d,]+ of [\d,]+",
        r"density +[\d.]+ %",
        r"size +[\d.]+ k?B",
        r"[\d.]+ bits",
        r"[\d.]+× smaller",
        r"s, [\d.]+ GB/s",
    ):
        assert re.search(pattern, done.stdout), pattern


def test_inspect_lists_what_diff_counted(files: tuple[Path, Path], tmp_path: Path) -> None:
    made = succeed("diff", *files, "-o", tmp_path / "step.delta")
    shown = succeed("inspect", tmp_path / "step.delta", "--base", files[0])
    for key in ("bytes", "before", "after", "changed", "tensors_changed"):
        assert shown[key] == made[key]
    old, new = model(), updated(model())
    for tensor in shown["tensors"]:
        bits = f"u{old[tensor['name']].dtype.itemsize}"
        before, after = old[tensor["name"]].reshape(-1).view(bits), new[tensor["name"]].reshape(-1).view(bits)
        assert tensor["elements"] == before.size
        assert tensor["changed"] == int((before != after).sum())
    assert sum(tensor["changed"] for tensor in shown["tensors"]) == sum(payload["changed"] for payload in shown["payloads"])
    for payload in shown["payloads"]:
        assert payload["changed"] == sum(chunk["changed"] for chunk in payload["chunks"]) == sum(payload["values"].values())
        assert payload["elements"] == sum(chunk["elements"] for chunk in payload["chunks"]) == sum(payload["modes"].values())
    assert "tensors" not in succeed("inspect", tmp_path / "step.delta")
    fail("inspect", tmp_path / "step.delta", "--base", files[1], kind="BaseMismatch")


@pytest.mark.parametrize(("order", "key"), [("size", "changed"), ("density", "density"), ("name", "name")])
def test_inspect_sorts_and_cuts_the_list(files: tuple[Path, Path], delta: Path, order: str, key: str) -> None:
    listed = ("inspect", delta, "--base", files[0], "--sort", order)
    everything = [tensor[key] for tensor in succeed(*listed)["tensors"]]
    assert everything == sorted(everything, reverse=order != "name")
    assert [tensor[key] for tensor in succeed(*listed, "--top", 2)["tensors"]] == everything[:2]
    assert len(succeed("inspect", delta, "--sort", order)["payloads"]) > 1


def test_inspect_fits_eighty_columns(files: tuple[Path, Path], delta: Path) -> None:
    for arguments in ((), ("--base", files[0])):
        done = run("inspect", delta, "--top", 1, *arguments, columns=80)
        assert done.returncode == 0
        lines = done.stdout.splitlines()[1:-1]
        assert max(len(line.rstrip()) for line in lines) <= 80
        assert f"more {'tensors' if arguments else 'payloads'} are not shown" in done.stdout
    assert re.search("[▁▂▃▄▅▆▇█]{8}", run("inspect", delta, columns=80).stdout)


def test_inspect_into_a_pipe_prints_whole_names(files: tuple[Path, Path], delta: Path) -> None:
    assert "model.layers.0.self_attn.q_proj.weight" in run("inspect", delta, "--base", files[0]).stdout


def test_tensor_names_cannot_command_the_terminal(tmp_path: Path) -> None:
    for file_name, value in (("old", 0.0), ("new", 1.0)):
        save_file({"a\x1b[31m[bold]b": np.full(3, value)}, tmp_path / file_name)
    succeed("diff", tmp_path / "old", tmp_path / "new", "-o", tmp_path / "step.delta")
    done = run("inspect", tmp_path / "step.delta", "--base", tmp_path / "old")
    assert "\x1b" not in done.stdout
    assert "a\ufffd[31m[bold]b" in done.stdout


def test_the_wrong_base_is_refused_and_nothing_is_left(files: tuple[Path, Path], delta: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    fail("apply", files[1], delta, "-o", tmp_path / "out.safetensors", kind="BaseMismatch")
    save_file({"other": np.zeros(3)}, tmp_path / "other.safetensors")
    message = fail("apply", tmp_path / "other.safetensors", delta, "-o", tmp_path / "out.safetensors", kind="BaseMismatch")
    assert "other.safetensors" in message
    assert sorted(tmp_path.iterdir()) == sorted([*before, tmp_path / "other.safetensors"])


def test_a_damaged_delta_is_refused_and_nothing_is_left(files: tuple[Path, Path], delta: Path, tmp_path: Path) -> None:
    content = delta.read_bytes()
    for damaged in (b"", content[:5], content[:-1], content[: len(content) // 2], content + b"\0", bytes([content[0] ^ 1]) + content[1:]):
        delta.write_bytes(damaged)
        fail("apply", files[0], delta, "-o", tmp_path / "out.safetensors", kind="CorruptDelta")
        fail("inspect", delta, kind="CorruptDelta")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new.safetensors", "old.safetensors", "step.delta"]


def test_a_truncated_checkpoint_is_refused(files: tuple[Path, Path], tmp_path: Path) -> None:
    files[1].write_bytes(files[1].read_bytes()[:-10])
    assert "cut short" in fail("diff", *files, "-o", tmp_path / "step.delta", kind="CheckpointError")
    assert not (tmp_path / "step.delta").exists()


def test_a_malicious_index_is_refused(tmp_path: Path) -> None:
    save_sharded(tmp_path / "old", halves(model()))
    (tmp_path / "old" / INDEX).write_text(json.dumps({"weight_map": {"x": "../../secret.safetensors"}}))
    assert "Do not trust" in fail("diff", tmp_path / "old", tmp_path / "old", "-o", tmp_path / "step.delta", kind="CheckpointError")


def test_missing_files_are_named(files: tuple[Path, Path], delta: Path, tmp_path: Path) -> None:
    for arguments in (
        ("diff", tmp_path / "nowhere", files[1], "-o", tmp_path / "x"),
        ("diff", *files, "-o", tmp_path / "nowhere" / "x"),
        ("apply", files[0], tmp_path / "nowhere", "-o", tmp_path / "x"),
        ("apply", files[0], delta, "-o", tmp_path / "nowhere" / "x"),
        ("inspect", tmp_path / "nowhere"),
    ):
        assert "nowhere: no such file or directory" in fail(*arguments, kind="FileNotFoundError")


def test_outputs_are_replaced_only_by_force(files: tuple[Path, Path], delta: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    out.write_text("precious")
    content = delta.read_bytes()
    assert "--force" in fail("apply", files[0], delta, "-o", out, kind="CheckpointError")
    assert "--force" in fail("diff", *files, "-o", delta, kind="CheckpointError")
    assert (out.read_text(), delta.read_bytes()) == ("precious", content)
    succeed("apply", files[0], delta, "-o", out, "--force")
    succeed("diff", files[1], files[0], "-o", delta, "--force")
    assert out.read_bytes() == files[1].read_bytes()
    assert delta.read_bytes() != content


def test_inputs_are_never_overwritten(files: tuple[Path, Path], delta: Path, tmp_path: Path) -> None:
    old, new = files
    contents = [path.read_bytes() for path in (old, new, delta)]
    for arguments in (
        ("diff", old, new, "-o", old, "--force"),
        ("diff", old, new, "-o", new, "--force"),
        ("diff", old, new, "-o", tmp_path, "--force"),
        ("apply", old, delta, "-o", old, "--force"),
        ("apply", old, delta, "-o", delta, "--force"),
        ("apply", old, delta, "-o", tmp_path, "--force"),
    ):
        fail(*arguments, kind="CheckpointError")
    assert [path.read_bytes() for path in (old, new, delta)] == contents


@pytest.mark.parametrize(
    "arguments", [[], ["merge"], ["diff"], ["diff", "a", "b"], ["inspect", "a", "--sort", "luck"], ["inspect", "a", "--top", "0"]]
)
def test_wrong_usage_exits_with_two(arguments: list[str]) -> None:
    assert run(*arguments).returncode == 2


def test_version_and_help_do_not_need_the_codec() -> None:
    assert re.fullmatch(r"deltawire \d+\.\d+\.\d+\S*\n", run("--version").stdout)
    for command in ("diff", "apply", "inspect"):
        assert run(command, "--help").returncode == 0


# Tests in which processes are stopped, starved or killed. Each process runs the real command after a few lines of preparation.

_MAIN = "\nfrom deltawire.cli import main\nmain()\n"
_PAUSE = "import sys, time\ndef pause(*_, **__):\n    print('paused', flush=True)\n    time.sleep(60)\n"
_PAUSE_BEFORE_COMMIT = (
    _PAUSE + "from deltawire.format.checkpoints.checkpoint_copy import WritableCheckpoint\nWritableCheckpoint.commit = pause\n" + _MAIN
)
_PAUSE_IN_DIFF = (
    _PAUSE
    + "from contextlib import contextmanager\nimport deltawire.cli.commands.diff\n"
    + "@contextmanager\ndef bar(*_, **__):\n    yield pause\nsys.modules['deltawire.cli.commands.diff'].progress_bar = bar\n"
    + _MAIN
)


def stop_when_paused(program: str, *arguments: object, number: int) -> tuple[int, str]:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        process.send_signal(number)
        _, errors = process.communicate(timeout=300)
        assert line == "paused\n", errors
    return process.returncode, errors


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_leaves_nothing_behind(files: tuple[Path, Path], delta: Path, tmp_path: Path, number: int, code: int) -> None:
    before = sorted(tmp_path.iterdir())
    for program, arguments in (
        (_PAUSE_BEFORE_COMMIT, ("apply", files[0], delta, "-o", tmp_path / "out.safetensors")),
        (_PAUSE_IN_DIFF, ("diff", *files, "-o", tmp_path / "other.delta")),
    ):
        returned, errors = stop_when_paused(program, *arguments, number=number)
        assert (returned, errors) == (code, "interrupted\n")
        assert sorted(tmp_path.iterdir()) == before


def test_a_kill_in_the_middle_leaves_no_output_and_the_next_run_succeeds(files: tuple[Path, Path], delta: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    returned, _ = stop_when_paused(_PAUSE_BEFORE_COMMIT, "apply", files[0], delta, "-o", out, number=signal.SIGKILL)
    assert returned == -signal.SIGKILL
    assert not out.exists()
    assert len(list(tmp_path.glob("out.safetensors.tmp-*"))) == 1
    succeed("apply", files[0], delta, "-o", out)
    assert out.read_bytes() == files[1].read_bytes()


def test_a_full_disk_is_an_error_that_leaves_nothing_behind(files: tuple[Path, Path], delta: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    for limit, arguments in (
        (20_000, ("apply", files[0], delta, "-o", tmp_path / "out.safetensors")),
        (1_000, ("diff", *files, "-o", tmp_path / "other.delta")),
    ):
        program = f"import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))" + _MAIN
        done = run_python(["-c", program], *arguments)
        assert done.returncode == 1, done.stderr
        assert re.fullmatch(r"error: .+ size limit .+\n", done.stderr), done.stderr
        assert sorted(tmp_path.iterdir()) == before


_WITH_LITTLE_MEMORY = """
import re, resource
import deltawire.delta.resolve, deltawire.cli, deltawire.format.checkpoints.checkpoint_copy
resident = int(re.search(r"VmData:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (resident + (112 << 20),) * 2)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc and relies on RLIMIT_DATA counting private memory")
def test_a_checkpoint_larger_than_memory_is_diffed_and_applied(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    old: dict[str, Tensors] = {
        FIRST: {"large": rng.integers(0, 1 << 16, 64 << 20, np.uint16).view(ml_dtypes.bfloat16)},
        SECOND: {f"layer.{layer}": rng.integers(0, 1 << 16, 8 << 20, np.uint16).view(ml_dtypes.bfloat16) for layer in range(8)},
    }
    save_sharded(tmp_path / "old", old)
    for tensors in old.values():
        for array in tensors.values():
            array.view(np.uint16)[:: int(rng.integers(90, 110))] ^= 1
    save_sharded(tmp_path / "new", old)
    assert sum(array.nbytes for tensors in old.values() for array in tensors.values()) == 256 << 20
    for arguments in (
        ("diff", tmp_path / "old", tmp_path / "new", "-o", tmp_path / "step.delta"),
        ("apply", tmp_path / "old", tmp_path / "step.delta", "-o", tmp_path / "out"),
    ):
        done = run_python(["-c", _WITH_LITTLE_MEMORY + _MAIN], *arguments, "--threads", 2)
        assert done.returncode == 0, done.stderr
    for name in (FIRST, SECOND):
        assert_same(load(tmp_path / "out" / name), old[name])
