"""`deltawire canary URL --engine URL`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..options.chain import RunOption, TrustOption, UrlArgument, find_seq, load_signing_key, reader_options
from ..options.common import JsonOption, VerboseOption
from ..output.terminal import print_json, print_notice, print_rows
from ..process.exit_codes import exit_codes
from ..stores.opened import opened


def canary(
    url: UrlArgument,
    engine: Annotated[
        str, typer.Option("--engine", metavar="URL", help="The URL of the vLLM server, such as http://127.0.0.1:8000.", show_default=False)
    ],
    at: Annotated[
        int | None,
        typer.Option(
            "--at",
            min=1,
            metavar="VERSION",
            help="The version that the server was started with. A server that `sidecar` updates tells it by itself.",
            show_default=False,
        ),
    ] = None,
    sign: Annotated[
        Path | None,
        typer.Option("--sign", metavar="KEYFILE", help="Sign the record with this key, which `keygen` made.", show_default=False),
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace an earlier record of the version, such as one from a faulty server.")
    ] = False,
    trust: TrustOption = None,
    run: RunOption = None,
    verbose: VerboseOption = False,
    json: JsonOption = False,
) -> None:
    """Record the tokens that a healthy vLLM server generates with a version.

    The record holds a few tokens and their log-probs. `deltawire sidecar --canary recorded` compares other servers with it. Record on a
    server that you trust, for example one that was just started with `deltawire pull`. A version is recorded once; --replace records it
    again.

    On a signed chain, the record must be signed too (--sign). Without --trust, by the key of the first commit.
    """
    with exit_codes(json):
        from ...engines.vllm.driver.routes import VllmRoutes
        from ...engines.vllm.driver.server_canary import record_canary

        key = None if sign is None else load_signing_key(sign)
        routes = VllmRoutes(engine)
        try:
            with opened(url, verbose=verbose) as store:
                chain = reader_options(run, trust).open_log(store)
                chain.trust_first_key()
                seq = find_seq(chain, at, None)
                recording = record_canary(routes, chain, None if seq is None else chain.read(seq), key=key, replace=replace)
                record = recording.record
                version = chain.version(record.target.seq)
        finally:
            routes.close()
        tokens = sum(len(each.tokens) for each in record.recorded)
        if json:
            found = {"version": version.updates, "seq": version.seq, "tokens": tokens, "signed": record.signature is not None}
            print_json({**found, "recorded_before": recording.was_there})
        else:
            if recording.was_there:
                unused = "" if key is None else "; the key was not used"
                print_notice(
                    f"version {version.updates} was recorded before, {'unsigned' if record.signature is None else 'signed'}{unused}. "
                    "--replace records it again."
                )
            print_rows(
                f"version {version.updates} is recorded",
                [("tokens", str(tokens)), ("signed", "no" if record.signature is None else f"by {record.signature.key}")],
            )
