"""`deltawire apply BASE DELTA -o OUT`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..options.common import ForceOption, JsonOption, ThreadsOption
from ..output import figures
from ..output.progress import progress_bar
from ..output.terminal import print_json, print_rows
from ..process.exit_codes import exit_codes

if TYPE_CHECKING:
    from ...format.checkpoints.checkpoint import Checkpoint
    from ...format.delta_file import DeltaFile


def apply(
    base: Annotated[
        Path, typer.Argument(metavar="BASE", help="A .safetensors file or a checkpoint directory: the old weights.", show_default=False)
    ],
    delta: Annotated[Path, typer.Argument(metavar="DELTA", help="A delta file that was made from BASE.", show_default=False)],
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="OUT", help="Write the new checkpoint here, in the layout of BASE.", show_default=False)
    ],
    force: ForceOption = False,
    threads: ThreadsOption = None,
    json: JsonOption = False,
) -> None:
    """Apply a delta file to a checkpoint, and write the result.

    The result is exactly the checkpoint that the delta was made for. The command checks BASE before and the result afterwards, and OUT
    appears only when it is complete. Tensors are mapped, not loaded, so checkpoints may be larger than memory. Other files of a checkpoint
    directory are copied, except other weights.
    """
    with exit_codes(json):
        from ...delta.resolve import apply_file
        from ...format.checkpoints.checkpoint import Checkpoint
        from ...format.checkpoints.checkpoint_copy import copy_checkpoint
        from ...format.checkpoints.staged_output import refuse_overlap
        from ...format.delta_file import parse
        from ..delta_input import map_delta, refuse_delta

        started = time.perf_counter()
        refuse_delta(base)
        source, mapped = Checkpoint(base), map_delta(delta)
        refuse_overlap(delta, out)
        file = parse(mapped)
        _refuse_other_model(file, source)
        structure = file.structure
        with progress_bar(f"copy {base.name}", source.weight_bytes, quiet=json) as progress:
            state = copy_checkpoint(source, out, drop=set(structure.removed), add=structure.added, replace=force, progress=progress)
        with state:
            with progress_bar(f"apply {delta.name}", source.weight_bytes, quiet=json) as progress:
                changed = apply_file(state, file, threads=threads, progress=progress)
            state.commit()
        result = Applied(out, source.weight_bytes, len(mapped), file, changed, state.left_out, time.perf_counter() - started)
        if json:
            print_json(_as_json(result))
        else:
            _print(result)


@dataclass(frozen=True, slots=True)
class Applied:
    """The results of the command, for the report. `left_out` are the files of the base directory that were not copied."""

    out: Path
    weight_bytes: int
    delta_bytes: int
    file: DeltaFile
    tensors_changed: int
    left_out: list[str]
    seconds: float


def _refuse_other_model(file: DeltaFile, source: Checkpoint) -> None:
    """Raise `TensorMissing`, before gigabytes are copied, if the names show that the delta is for another model.

    The codec checks everything again later.
    """
    from ...errors import BaseMismatch, TensorMissing
    from ...format.delta_file import GroupedDelta

    if isinstance(file, GroupedDelta) and file.tensors != len(source) - len(file.structure.removed) + len(file.structure.added):
        raise BaseMismatch(f"{source.path} has {len(source):,} tensors, which are not those that the delta was made from.")
    named = [] if isinstance(file, GroupedDelta) else file.payloads
    for name in [*named, *file.structure.aliases]:
        if name not in source and name not in file.structure.added:
            raise TensorMissing(f"{source.path} has no tensor {name!r}, which the delta changes.")


def _as_json(result: Applied) -> dict[str, object]:
    return {
        "out": str(result.out),
        "weight_bytes": result.weight_bytes,
        "delta_bytes": result.delta_bytes,
        "tensors_changed": result.tensors_changed,
        "added": sorted(result.file.structure.added),
        "removed": sorted(result.file.structure.removed),
        "left_out": result.left_out,
        "before": result.file.before.hex(),
        "after": result.file.after.hex(),
        "seconds": result.seconds,
        "gigabytes_per_second": result.weight_bytes / 1e9 / result.seconds,
    }


def _print(result: Applied) -> None:
    file = result.file
    print_rows(
        str(result.out),
        [
            ("changed tensors", f"{result.tensors_changed:,}"),
            ("tensors added", ", ".join(sorted(file.structure.added))),
            ("tensors removed", ", ".join(sorted(file.structure.removed))),
            ("not copied", ", ".join(result.left_out)),
            ("time", f"{result.seconds:.2f} s, {figures.ratio(result.weight_bytes / 1e9, result.seconds, ' GB/s')}"),
            ("digest", f"{file.before.hex()} → {file.after.hex()}, checked"),
        ],
    )
