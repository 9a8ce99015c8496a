"""Runs an example as it is, except that its processes other than a vLLM server have their packages imported when they start."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forked_python import forked_run
from server_nursery import NOT_COMPILED

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
_WITH_FORKED_PROCESSES = """
import runpy, subprocess, sys

from forked_python import ForkedPopen


class Popen(subprocess.Popen):
    def __new__(cls, command, **options):
        if "vllm.entrypoints.openai.api_server" in command:
            return real(command, **options)
        return ForkedPopen(warm_up, command[1:], **options)


real, subprocess.Popen = subprocess.Popen, Popen
warm_up = sys.argv[1]
del sys.argv[:2]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_example(warm_up: str, script: Path, *arguments: Any, environment: Mapping[str, str]) -> str:
    """Run a script of an example to its end, and return what it printed. Its processes are forked from the parent with this warm-up."""
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", **NOT_COMPILED, **environment}
    command = ["-c", _WITH_FORKED_PROCESSES, warm_up, script, *arguments]
    done = forked_run(warm_up, command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=900)
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout
