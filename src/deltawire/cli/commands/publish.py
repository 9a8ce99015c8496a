"""`deltawire publish CKPT URL`."""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..options.chain import KEYS_METAVAR, UrlArgument, load_signing_key, read_keys
from ..options.common import JsonOption, ThreadsOption, VerboseOption
from ..options.metrics import MetricsOption, counted
from ..options.network import MaxRateOption, MaxRequestsOption, store_options
from ..output.event_notices import print_if_verbose
from ..output.progress import transfer_bars
from ..output.publish_report import Published, report_forecast, report_published, report_unchanged, warnings_of
from ..process.exit_codes import exit_codes
from ..publish_input import check_run, check_step, find_attachments, parse_meta, parse_recipe, refuse_chain, refuse_nonfinite
from ..stores.opened import opened

if TYPE_CHECKING:
    from ...events import Event


def publish(
    checkpoint: Annotated[Path, typer.Argument(metavar="CKPT", help="A .safetensors file or a checkpoint directory.", show_default=False)],
    url: UrlArgument,
    step: Annotated[
        int | None,
        typer.Option(
            "--step", min=0, metavar="N", help="Record this training step with the version.", show_default=False, callback=check_step
        ),
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(
            "--run", metavar="NAME", help="Refuse a chain whose run has another name. A new run gets this name.", show_default=False
        ),
    ] = None,
    meta: Annotated[
        list[str] | None,
        typer.Option("--meta", metavar="NAME=VALUE", help="Store this string with the version. May be repeated.", show_default=False),
    ] = None,
    sign: Annotated[
        Path | None,
        typer.Option("--sign", metavar="KEYFILE", help="Sign the version with this key, which `keygen` made.", show_default=False),
    ] = None,
    trust: Annotated[
        list[str] | None,
        typer.Option(
            "--trust",
            metavar=KEYS_METAVAR,
            help="With --sign: also accept a chain that this public key has signed, for a change of keys. May be repeated.",
            show_default=False,
            callback=read_keys,
        ),
    ] = None,
    full: Annotated[
        bool,
        typer.Option("--full", help="Publish a full checkpoint, without reading the newest version back. This repairs a damaged chain."),
    ] = False,
    resume_from: Annotated[
        int | None,
        typer.Option(
            "--resume-from",
            min=1,
            metavar="VERSION",
            help="Go back to this version first. Later versions are abandoned.",
            show_default=False,
        ),
    ] = None,
    if_changed: Annotated[
        bool, typer.Option("--if-changed", help="Publish nothing if the newest version has the same weights and files.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be published, and write nothing.")] = False,
    allow_nonfinite: Annotated[
        bool, typer.Option("--allow-nonfinite", help="Publish weights even if some are NaN or infinite. Not with --quantise.")
    ] = False,
    quantise: Annotated[
        str | None,
        typer.Option(
            "--quantise",
            metavar="RECIPE",
            help="Quantise the weights first: fp8-block, fp8-block-ue8m0, fp8-channel, fp8-tensor, nvfp4, mxfp4, int4 or int4-128. "
            "`none` publishes them as they are, even after a quantised version.",
            show_default=False,
        ),
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(
            "--ignore",
            metavar="PATTERN",
            help="With --quantise: do not quantise this layer either. A layer's name, or re: and a regular expression. May be repeated.",
            show_default=False,
        ),
    ] = None,
    max_rate: MaxRateOption = None,
    max_requests: MaxRequestsOption = None,
    metrics: MetricsOption = None,
    threads: ThreadsOption = None,
    verbose: VerboseOption = False,
    json: JsonOption = False,
) -> None:
    """Publish a checkpoint as the next version of a chain.

    The first version is stored as a full checkpoint, later ones as deltas. The command takes the run over: a trainer that publishes there
    can publish no more. It reads the newest version back first, to compare with it.

    The other files of a checkpoint directory (config.json, tokenizer) are published with the weights, except other weights, hidden files
    and subdirectories. If CKPT is a single file, the version keeps the files of the version before.

    With --quantise, the version holds what the recipe makes of the weights, with the scales of the version before as long as they fit.
    Weights that the recipe leaves out become bfloat16: embeddings, norms, routers and the head, and layers that --ignore names.
    If the newest version is quantised, --quantise is required.
    """
    # Wrong usage must be found before the run is taken over.
    strings = parse_meta(meta or [])
    check_run(run)
    if trust and sign is None:
        raise typer.BadParameter("it names further keys that may have signed the chain, so it needs --sign.", param_hint="--trust")
    recipe = parse_recipe(quantise, ignore or [], allows_nonfinite=allow_nonfinite)
    with exit_codes(json), transfer_bars(f"publish {checkpoint.name}", quiet=json or verbose) as bars:
        from ...chain.find import find_version
        from ...chain.version import Version
        from ...format.checkpoints.checkpoint import Checkpoint
        from ...publish.commits import open_log
        from ...publish.publisher import Publisher
        from ...publish.writer_options import WriterOptions
        from ..publish_check import PublishedForm, forecast, newest_if_same, newest_or_none, refuse_above_limits, refuse_without_recipe
        from ..stores.metered_store import MeteredStore

        started = time.perf_counter()
        refuse_chain(checkpoint)
        state = Checkpoint(checkpoint)
        if not allow_nonfinite:
            refuse_nonfinite(state, threads, is_quantised=recipe is not None)  # before the run is taken over
        attached, left_out = find_attachments(state)
        form = PublishedForm(state, recipe)
        attached = form.files(attached)
        key = None if sign is None else load_signing_key(sign)
        options = WriterOptions(signing_key=key, trusted_keys=trust or (), threads=threads)
        events: list[Event] = []

        def listen(event: Event) -> None:
            events.append(event)
            if event.name == "planned":
                bars.expect_read(f"read back version {event.fields['updates']}", int(event.fields["bytes"] or 0))
            print_if_verbose(event, verbose)

        with (
            counted(metrics, listen) as on_event,
            opened(url, verbose=verbose, options=store_options(max_rate, max_requests)) as plain,
        ):
            store = MeteredStore(plain, bars.read, written=bars.uploaded, announced=bars.expect_upload)
            chain = open_log(store, run, options)
            refuse_above_limits(chain, form.table)
            base = None if resume_from is None else find_version(chain, resume_from)
            refuse_without_recipe(base or newest_or_none(chain), is_given=quantise is not None)
            if if_changed and base is None:
                same = newest_if_same(chain, form, attached, threads)
                if same is not None:
                    bars.close()
                    report_unchanged(store.url, Version.of(same), json)
                    return
            if dry_run:
                with _events_instead_of_warnings():
                    plan = forecast(chain, form, attached, base, step=step, full=full, threads=threads, on_event=on_event)
                bars.close()
                report_forecast(store.url, plan, form, left_out, warnings_of(events), json)
                return
            if newest_or_none(chain) is None:
                bars.announce_upload(form.table.state_bytes)
            with (
                _events_instead_of_warnings(),
                Publisher(
                    store,
                    run,
                    attachments=attached,
                    quantise=recipe,
                    resume_from_seq=None if base is None else base.seq,
                    starts_full=full,
                    options=options,
                    on_event=on_event,
                ) as publisher,
            ):
                version = publisher.publish(state, step=step, meta=strings)
        assert isinstance(version, Version)  # because it does not publish in the background
        elements = sum(map(math.prod, form.table.shapes))
        bars.close()
        report_published(Published(store.url, version, elements, left_out, events, time.perf_counter() - started), json)


@contextlib.contextmanager
def _events_instead_of_warnings() -> Iterator[None]:
    """Suppress warnings: each of them is also an event, which the report prints."""
    from ...warnings import DeltawireWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeltawireWarning)
        yield
