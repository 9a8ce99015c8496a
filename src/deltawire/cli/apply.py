"""`deltawire apply BASE DELTA -o OUT`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import figures
from .terminal import ForceOption, JsonOption, ThreadsOption, exit_codes, print_json, print_rows, progress_bar

if TYPE_CHECKING:
    from ..delta import DeltaFacts
    from ..format.checkpoint import Checkpoint


def apply(
    base: Annotated[Path, typer.Argument(metavar="BASE", help="A .safetensors file or a checkpoint directory.", show_default=False)],
    delta: Annotated[Path, typer.Argument(metavar="DELTA", help="A delta made from BASE.", show_default=False)],
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="OUT", help="The checkpoint to write, in the layout of BASE.", show_default=False)
    ],
    force: ForceOption = False,
    threads: ThreadsOption = None,
    json: JsonOption = False,
) -> None:
    """Write BASE with DELTA applied, exactly the checkpoint that the delta was made for.

    BASE is checked before and the result after; OUT appears only when it is complete and right. Tensors are mapped, not loaded.
    Other files of a directory are copied along, except other weights.
    """
    with exit_codes(json):
        from ..delta import apply_delta, inspect_delta
        from ..dtypes import dtype_named
        from ..format.checkpoint import Checkpoint
        from ..format.checkpoint_copy import copy_checkpoint
        from ..format.staged_output import refuse_overlap
        from .delta_input import map_delta

        started = time.perf_counter()
        source, mapped = Checkpoint(base), map_delta(delta)
        refuse_overlap(delta, out)
        facts = inspect_delta(mapped)
        _refuse_foreign(facts, source)
        added = {name: (dtype_named(dtype), tuple(shape)) for name, (dtype, shape) in facts.added.items()}
        with progress_bar(f"copy {base.name}", source.weight_bytes, quiet=json) as progress:
            state = copy_checkpoint(source, out, drop=set(facts.removed), add=added, replace=force, progress=progress)
        with state:
            with progress_bar(f"apply {delta.name}", source.weight_bytes, quiet=json) as progress:
                apply_delta(state, mapped, threads=threads, progress=progress)
            state.commit()
        seconds = time.perf_counter() - started
        if json:
            print_json(_as_json(out, facts, source, state.left_out, seconds))
        else:
            _print(out, facts, source, state.left_out, seconds)


def _refuse_foreign(facts: DeltaFacts, source: Checkpoint) -> None:
    """Fail before gigabytes are copied where names alone show that the delta is for another model. The codec checks everything again."""
    from ..errors import TensorMissing

    for name in [*(tensor.name for tensor in facts.tensors), *facts.aliases]:
        if name not in source and name not in facts.added:
            raise TensorMissing(f"{source.path} has no tensor {name!r}, which the delta changes.")


def _as_json(out: Path, facts: DeltaFacts, source: Checkpoint, left_out: list[str], seconds: float) -> dict[str, object]:
    return {
        "out": str(out),
        "weight_bytes": source.weight_bytes,
        "delta_bytes": facts.bytes,
        "tensors_changed": len(facts.tensors) + len(facts.aliases),
        "changed": sum(tensor.changed for tensor in facts.tensors),
        "added": sorted(facts.added),
        "removed": sorted(facts.removed),
        "left_out": left_out,
        "before": facts.before.hex(),
        "after": facts.after.hex(),
        "seconds": seconds,
        "gigabytes_per_second": source.weight_bytes / 1e9 / seconds,
    }


def _print(out: Path, facts: DeltaFacts, source: Checkpoint, left_out: list[str], seconds: float) -> None:
    changed = sum(tensor.changed for tensor in facts.tensors)
    print_rows(
        str(out),
        [
            ("changed weights", f"{changed:,}, in {len(facts.tensors) + len(facts.aliases):,} tensors"),
            ("tensors added", ", ".join(sorted(facts.added))),
            ("tensors removed", ", ".join(sorted(facts.removed))),
            ("not copied", ", ".join(left_out)),
            ("time", f"{seconds:.2f} s, {figures.ratio(source.weight_bytes / 1e9, seconds, ' GB/s')}"),
            ("digest", f"{facts.before.hex()} → {facts.after.hex()}, checked"),
        ],
    )
