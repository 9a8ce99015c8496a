"""A vLLM plugin for measurements of processor time: processes of a server sleep while they wait for messages.

A process of vLLM that has read a message from shared memory looks for the next one without a break for a second. It uses a core meanwhile,
whatever the server does. So a measurement of some calls counts that second, too, or as much of it as other processes leave to this one.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

_SPIN_SECONDS = 0.002
_METADATA = "Metadata-Version: 2.1\nName: deltawire-bench-readers\nVersion: 0\n"


def plugin_path(folder: Path) -> str:
    """Return directories for PYTHONPATH in which vLLM finds the plugin.

    Parameters
    ----------
    folder
        A new directory.
    """
    metadata = folder / "deltawire_bench_readers-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(_METADATA)
    (metadata / "entry_points.txt").write_text("[vllm.general_plugins]\nbench_readers = sleeping_readers:register\n")
    return f"{folder}:{Path(__file__).parent}"


def register() -> None:
    """Let the readers of this process sleep after two milliseconds. vLLM calls this in every process."""
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    def record_read(reader: Any) -> None:
        reader.last_read = time.monotonic() - max(0.0, reader.busy_loop_s - _SPIN_SECONDS)

    assert hasattr(SpinCondition, "record_read")
    SpinCondition.record_read = record_read
