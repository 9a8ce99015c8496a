"""`deltawire diff OLD NEW -o FILE`."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..options.common import ForceOption, JsonOption, ThreadsOption
from ..output import figures
from ..output.progress import progress_bar
from ..output.terminal import print_json, print_rows
from ..process.exit_codes import exit_codes

if TYPE_CHECKING:
    from ...delta.encode import DeltaSummary
    from ...format.checkpoints.checkpoint import Checkpoint


def diff(
    old: Annotated[
        Path, typer.Argument(metavar="OLD", help="A .safetensors file or a checkpoint directory: the old weights.", show_default=False)
    ],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="The same checkpoint after an update.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="Write the delta file here.", show_default=False)],
    force: ForceOption = False,
    threads: ThreadsOption = None,
    json: JsonOption = False,
) -> None:
    """Write a delta file that turns one checkpoint into another.

    `deltawire apply` makes exactly NEW from OLD and the delta. Tensors are mapped, not loaded, so checkpoints may be larger than memory.
    FILE appears only when it is complete.
    """
    with exit_codes(json):
        from ...delta.encode import write_delta
        from ...format.checkpoints.checkpoint import Checkpoint

        before, after = Checkpoint(old), Checkpoint(new)
        _refuse_output(out, (before, after), force)
        started = time.perf_counter()
        with progress_bar(f"diff {new.name}", after.weight_bytes, quiet=json) as progress:
            summary = write_delta(before, after, out, threads=threads, progress=progress)
        seconds = time.perf_counter() - started
        if json:
            print_json(_as_json(out, summary, seconds))
        else:
            _print(out, summary, seconds, len(after))


def _refuse_output(out: Path, inputs: tuple[Checkpoint, ...], force: bool) -> None:
    from ...errors import CheckpointError

    os.stat(out.parent)  # fail before gigabytes are compared if the directory does not exist
    if not os.path.lexists(out):
        return
    if out.is_dir():
        raise CheckpointError(f"{out} is a directory. Name the delta file to write.")
    if any(out.exists() and out.samefile(shard.path) for checkpoint in inputs for shard in checkpoint.shards):
        raise CheckpointError(f"{out} is a part of the checkpoints to compare. Name another output.")
    if not force:
        raise CheckpointError(f"{out} exists already. Name another output, or pass --force to replace it.")


def _as_json(out: Path, summary: DeltaSummary, seconds: float) -> dict[str, object]:
    return {
        "delta": str(out),
        "bytes": summary.bytes,
        "weight_bytes": summary.weight_bytes,
        "elements": summary.elements,
        "changed": summary.changed,
        "tensors_changed": summary.tensors_changed,
        "density": summary.changed / summary.elements if summary.elements else 0.0,
        "bits_per_change": figures.bits_per_change(summary.bytes, summary.changed),
        "times_smaller": summary.weight_bytes / summary.bytes,
        "before": summary.before.hex(),
        "after": summary.after.hex(),
        "seconds": seconds,
        "gigabytes_per_second": summary.weight_bytes / 1e9 / seconds,
    }


def _print(out: Path, summary: DeltaSummary, seconds: float, tensors: int) -> None:
    changed, weight_bytes = summary.changed, summary.weight_bytes
    print_rows(
        str(out),
        [
            ("changed weights", f"{changed:,} of {summary.elements:,}, in {summary.tensors_changed:,} of {tensors:,} tensors"),
            ("density", f"{figures.percent(changed, summary.elements)} %"),
            ("size", figures.size(summary.bytes)),
            ("per changed weight", figures.ratio(8 * summary.bytes, changed, " bits")),
            ("compared", f"{figures.ratio(weight_bytes, summary.bytes, '×')} smaller than the full weights ({figures.size(weight_bytes)})"),
            ("time", f"{seconds:.2f} s, {figures.ratio(weight_bytes / 1e9, seconds, ' GB/s')}"),
            ("digest", f"{summary.before.hex()} → {summary.after.hex()}"),
        ],
    )
