"""`deltawire publish CKPT URL`."""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..chain_options import KEYS_METAVAR, UrlArgument, VerboseOption, load_signing_key, opened, read_keys, tell_if_verbose
from ..output import figures
from ..output.terminal import JsonOption, ThreadsOption, exit_codes, print_json, print_line, print_rows, transfer_bars

if TYPE_CHECKING:
    from ...chain.version import Version
    from ...events import Event
    from ...format.checkpoints.checkpoint import Checkpoint
    from ...tensors.bits import State
    from ..publish_check import Forecast


def _check_step(step: int | None) -> int | None:
    if step is not None and step >= 2**63:
        raise typer.BadParameter("a step is less than 2**63.")
    return step


def publish(
    checkpoint: Annotated[Path, typer.Argument(metavar="CKPT", help="A .safetensors file or a checkpoint directory.", show_default=False)],
    url: UrlArgument,
    step: Annotated[
        int | None, typer.Option("--step", min=0, metavar="N", help="The trainer's step.", show_default=False, callback=_check_step)
    ] = None,
    run: Annotated[
        str | None,
        typer.Option("--run", metavar="NAME", help="The run that must live there, or its name if it is new.", show_default=False),
    ] = None,
    meta: Annotated[
        list[str] | None, typer.Option("--meta", metavar="NAME=VALUE", help="Goes with the version; may be repeated.", show_default=False)
    ] = None,
    sign: Annotated[
        Path | None, typer.Option("--sign", metavar="KEYFILE", help="Sign with a key that `keygen` made.", show_default=False)
    ] = None,
    trust: Annotated[
        list[str] | None,
        typer.Option(
            "--trust",
            metavar=KEYS_METAVAR,
            help="With --sign: go on with a chain that this key has signed, too; for a change of keys. May be repeated.",
            show_default=False,
            callback=read_keys,
        ),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Publish a full checkpoint. The newest version is not read back, so it may be damaged.")
    ] = False,
    resume_from: Annotated[
        int | None,
        typer.Option(
            "--resume-from", min=1, metavar="VERSION", help="Go back to this version first; later ones are abandoned.", show_default=False
        ),
    ] = None,
    if_changed: Annotated[
        bool, typer.Option("--if-changed", help="Publish nothing if the newest version has the same weights and files.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be published; write nothing.")] = False,
    allow_nonfinite: Annotated[
        bool, typer.Option("--allow-nonfinite", help="Publish weights that are NaN or infinite too, which are refused otherwise.")
    ] = False,
    threads: ThreadsOption = None,
    verbose: VerboseOption = False,
    json: JsonOption = False,
) -> None:
    """Publish a checkpoint as the next version of a chain: the first as a whole, later ones as deltas.

    Takes the run over: a trainer that publishes there is fenced off. The newest version is read back first, to compare with. The other
    files of a directory (config.json, tokenizer) belong to the version, except other weights, hidden files and subdirectories. A single
    file as CKPT has none: then those of the version before stay.
    """
    # What is wrong with these must show before the run is taken over.
    strings = parse_meta(meta or [])
    _check_run(run)
    if trust and sign is None:
        raise typer.BadParameter("it says whose versions may be gone on from when signing: give --sign, too.", param_hint="--trust")
    with exit_codes(json), transfer_bars(f"publish {checkpoint.name}", quiet=json or verbose) as bars:
        from ...chain.find import find_version
        from ...chain.version import Version
        from ...format.checkpoints.checkpoint import Checkpoint
        from ...publish.commits import open_log
        from ...publish.publisher import Publisher
        from ...publish.writer_options import WriterOptions
        from ..metered_store import MeteredStore
        from ..publish_check import forecast, newest_if_same, newest_or_none, refuse_above_limits

        started = time.perf_counter()
        _refuse_chain(checkpoint)
        state = Checkpoint(checkpoint)
        if not allow_nonfinite:
            refuse_nonfinite(state, threads)  # before the trainer that publishes there is fenced off
        attached, left_out = companions(state)
        key = None if sign is None else load_signing_key(sign)
        options = WriterOptions(signing_key=key, trusted_keys=trust or (), threads=threads)
        events: list[Event] = []

        def on_event(event: Event) -> None:
            events.append(event)
            if event.name == "planned":
                bars.expect_read(f"read back version {event.fields['updates']}", int(event.fields["bytes"] or 0))
            tell_if_verbose(event, verbose)

        with opened(url, verbose=verbose) as plain:
            store = MeteredStore(plain, bars.read, written=bars.uploaded, announced=bars.expect_upload)
            chain = open_log(store, run, options)
            refuse_above_limits(chain, state)
            base = None if resume_from is None else find_version(chain, resume_from)
            if if_changed and base is None:
                same = newest_if_same(chain, state, attached, threads)
                if same is not None:
                    bars.close()
                    _report_same(store.url, Version.of(same), json)
                    return
            if dry_run:
                plan = forecast(chain, state, attached, base, full=full, threads=threads, on_event=on_event)
                bars.close()
                _report_forecast(store.url, plan, state.weight_bytes, left_out, json)
                return
            if newest_or_none(chain) is None:
                bars.announce_upload(state.weight_bytes)
            with (
                _events_instead_of_warnings(),
                Publisher(
                    store,
                    run,
                    attachments=attached,
                    resume_from=None if base is None else base.seq,
                    starts_full=full,
                    options=options,
                    on_event=on_event,
                ) as publisher,
            ):
                version = publisher.publish(state, step=step, meta=strings)
        assert isinstance(version, Version)  # it publishes in the foreground
        elements = sum(math.prod(state.entry(name).shape) for name in state)
        done = Published(store.url, version, elements, left_out, events, time.perf_counter() - started)
        bars.close()
        if json:
            print_json(_as_json(done))
        else:
            print_rows(f"version {version.updates}", _rows(done))


def _report_same(url: str, version: Version, json: bool) -> None:
    if json:
        print_json({"url": url, "published": False, "version": version.updates, "seq": version.seq, "digest": version.digest.hex()})
    else:
        print_line(f"nothing to publish: version {version.updates} at {url} has these weights and files already")


def _report_forecast(url: str, plan: Forecast, weight_bytes: int, left_out: list[str], json: bool) -> None:
    if json:
        print_json(
            {
                "url": url,
                "published": False,
                "dry_run": True,
                "version": plan.version,
                "kind": plan.kind,
                "base": plan.base,
                "bytes": plan.bytes,
                "weight_bytes": weight_bytes,
                "changed": plan.changed,
                "files_changed": plan.files,
                "same": plan.is_same,
                "left_out": left_out,
            }
        )
        return
    of = "" if plan.base is None else f" over version {plan.base}"
    is_same = plan.kind == "delta" and not plan.changed
    size = _FILES_ONLY if is_same and plan.files else f"about {figures.size(plan.bytes)}, of {figures.size(weight_bytes)} of weights"
    print_rows(
        f"version {plan.version} would be published, nothing was written",
        [
            ("at", url),
            ("kind", ("a full checkpoint" if plan.kind == "anchor" else "delta") + of),
            ("changed weights", f"{plan.changed:,}" if plan.kind == "delta" else ""),
            ("changed files", ", ".join(plan.files)),
            ("size", size),
            ("not published", ", ".join(left_out)),
        ],
    )


_FILES_ONLY = "files only, no weights changed"


@dataclass(frozen=True, slots=True)
class Published:
    """What was done, for the report. `left_out` are the files of the directory that did not go with the weights."""

    url: str
    version: Version
    elements: int
    left_out: list[str]
    events: Sequence[Event]
    seconds: float

    @property
    def warnings(self) -> list[str]:
        """What the publisher warned of."""
        return [str(event.fields["message"]) for event in self.events if event.name in ("wide-weights", "non-finite-published")]

    @property
    def files_changed(self) -> list[str]:
        """Files beside the weights that differ from those of the version before. Removed ones are marked with a minus sign."""
        told = [event for event in self.events if event.name == "attachments-changed" and event.fields["seq"] == self.version.seq]
        return [name for event in told for name in str(event.fields["files"]).split(", ")]

    def shortcuts(self, name: str) -> list[dict[str, Any]]:
        """Fields of the shortcuts that were made along with the version."""
        return [dict(event.fields) for event in self.events if event.name == name]


@contextlib.contextmanager
def _events_instead_of_warnings() -> Iterator[None]:
    """Each warning is an event, too, which the report shows."""
    from ...warnings import DeltawireWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeltawireWarning)
        yield


def _refuse_chain(checkpoint: Path) -> None:
    from ...errors import CheckpointError
    from ...store.occupancy import misplaced

    if why := misplaced(checkpoint):
        raise CheckpointError(f"{checkpoint} {why}. The checkpoint comes first, and is on this machine: `deltawire publish CKPT URL`.")


def refuse_nonfinite(state: State, threads: int | None) -> None:
    """Raise `NonFiniteWeights` if there are weights that are NaN or infinite."""
    from ...errors import NonFiniteWeights
    from ...publish.advice import describe_nonfinite
    from ...tensors.finite import count_nonfinite

    bad = count_nonfinite(state, threads=threads)
    if bad:
        raise NonFiniteWeights(f"{describe_nonfinite(bad)}. Nothing is published.")


def _check_run(run: str | None) -> None:
    from ...format.records.chain_records import MAX_RUN_NAME

    if run is not None and not 1 <= len(run) <= MAX_RUN_NAME:
        raise typer.BadParameter(f"a run's name has 1 to {MAX_RUN_NAME} characters.", param_hint="--run")


def parse_meta(pairs: Sequence[str]) -> dict[str, str]:
    """Names and values from NAME=VALUE; anything else, and more than a commit has room for, is wrong usage."""
    strings: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"{pair!r} is not of the form NAME=VALUE.", param_hint="--meta")
        if name in strings:
            raise typer.BadParameter(f"{name!r} is given twice.", param_hint="--meta")
        strings[name] = value
    if strings:
        from ...errors import LimitExceeded
        from ...publish.commits import check_meta

        try:
            check_meta(strings)
        except LimitExceeded as error:
            raise typer.BadParameter(str(error).removesuffix(error.hint).rstrip(), param_hint="--meta") from None
    return strings


def companions(state: Checkpoint) -> tuple[dict[str, bytes | Path] | None, list[str]]:
    """The files beside the weights of a directory that go with them, and the names of those that do not. None for a single file."""
    from ...format.checkpoints.checkpoint import INDEX_FILE, MIRROR_RECORD_FILE, contained
    from ...format.checkpoints.checkpoint_copy import WEIGHT_SUFFIXES
    from ...format.checkpoints.shard_layout import LAYOUT_FILE, describe_layout

    if not state.is_directory:
        return None, []
    own = {shard.name for shard in state.shards} | {INDEX_FILE, LAYOUT_FILE, MIRROR_RECORD_FILE}
    layout = describe_layout(state)
    attached: dict[str, bytes | Path] = {} if layout is None else {LAYOUT_FILE: layout}
    left_out = []
    for path in sorted(state.path.iterdir()):
        if path.name in own or path.name.startswith("."):
            continue
        if path.is_file() and not path.name.lower().endswith(WEIGHT_SUFFIXES):
            attached[path.name] = contained(state.path, path.name)
        else:
            left_out.append(path.name)
    return attached, left_out


def _as_json(done: Published) -> dict[str, Any]:
    version = done.version
    return {
        "url": done.url,
        "published": True,
        "version": version.updates,
        "seq": version.seq,
        "kind": version.kind,
        "step": version.step,
        "epoch": version.epoch,
        "bytes": version.bytes,
        "weight_bytes": version.state_bytes,
        "times_smaller": version.state_bytes / version.bytes if version.bytes else None,
        "elements": done.elements,
        "changed": version.changed,
        "files_changed": done.files_changed,
        "density": version.changed / done.elements if done.elements else 0.0,
        "digest": version.digest.hex(),
        "meta": dict(version.meta),
        "skips_from": [made["base"] for made in done.shortcuts("skip-made")],
        "anchored": bool(done.shortcuts("anchored")),
        "left_out": done.left_out,
        "warnings": done.warnings,
        "seconds": done.seconds,
    }


def _rows(done: Published) -> list[tuple[str, str]]:
    version = done.version
    compared = (
        f"{figures.ratio(version.state_bytes, version.bytes, '×')} smaller than the full weights ({figures.size(version.state_bytes)})"
    )
    whole = f"a full checkpoint of {version.state_bytes / 1e9:.2f} GB" if version.state_bytes >= 1e9 else "a full checkpoint"
    changed = f"{version.changed:,} of {done.elements:,} ({figures.percent(version.changed, done.elements)} %)"
    return [
        ("at", done.url),
        ("kind", whole if version.kind == "anchor" else version.kind),
        ("step", "" if version.step is None else f"{version.step:,}"),
        ("changed weights", changed if version.kind == "delta" else ""),
        ("changed files", ", ".join(done.files_changed)),
        ("size", figures.size(version.bytes) if version.bytes or not done.files_changed else _FILES_ONLY),
        ("compared", compared if version.kind == "delta" and version.bytes else ""),
        ("skips", f"{len(done.shortcuts('skip-made'))} made" if done.shortcuts("skip-made") else ""),
        ("full checkpoint", "made, beside the delta" if done.shortcuts("anchored") else ""),
        ("not published", ", ".join(done.left_out)),
        *(("warning", warning) for warning in done.warnings),
        ("publisher", f"number {version.epoch} of this run"),
        ("digest", version.digest.hex()),
        ("time", f"{done.seconds:.2f} s"),
    ]
