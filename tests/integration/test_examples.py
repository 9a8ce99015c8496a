"""The examples and benchmarks run as they are. tests/demo tests `make demo`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from forked_python import forked_run

ROOT = Path(__file__).parents[2]


def test_the_demo_of_the_codec_ends_with_follower_and_trainer_equal(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", str(ROOT / "examples" / "codec_demo.py")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "(equal)" in done.stdout
    assert "BaseMismatch" in done.stdout
    assert "CorruptDelta" in done.stdout


def run_example(name: str, *arguments: str, cwd: Path) -> str:
    """Run an example that needs torch."""
    command = ["-W", "error", ROOT / "examples" / name, *arguments]
    done = forked_run("torch", command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_training_loop_publishes_and_a_transformers_model_follows(tmp_path: Path) -> None:
    """Two processes share only a directory."""
    pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")
    published = run_example("publish_from_training.py", "chain", cwd=tmp_path)
    digest = published.split("digest ")[1].split()[0]
    followed = run_example("follow_with_transformers.py", "chain", cwd=tmp_path)
    assert "by the weights of step 7" in followed
    assert f"digest {digest} (published: {digest})" in followed


def test_the_overhead_of_publishing_can_be_measured(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")
    script = f"""
import sys
sys.path.insert(0, {str(ROOT / "benchmarks")!r})
import publish_overhead
print(publish_overhead.measure(width=64, layers=1, tokens=128, steps=1, rounds=2).markdown())
"""
    done = forked_run("torch", ["-W", "error", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "in the background" in done.stdout


def test_the_benchmarks_run(tmp_path: Path) -> None:
    """The benchmarks run with small sizes, and do not overwrite the published results."""
    script = f"""
import sys
sys.path.insert(0, {str(ROOT / "benchmarks")!r})
import codec_density, codec_memory, codec_size, codec_speed, import_time
for table in (codec_size.measure(None), codec_speed.measure(1 << 20, 1), codec_memory.measure(1 << 20), import_time.measure(1)):
    print(table.markdown())
codec_density.DENSITIES = (0.01, 1.0)
print(codec_density.measure(1 << 18).markdown())
"""
    command = [sys.executable, "-W", "error", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("deltawire") >= 5
