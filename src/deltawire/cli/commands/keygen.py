"""`deltawire keygen FILE`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..chain_options import load_signing_key
from ..output.terminal import JsonOption, exit_codes, print_json, print_line, print_rows


def keygen(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to keep the key; it must not exist yet.", show_default=False)],
    public: Annotated[bool, typer.Option("--public", help="Make no key: print the public half of the one in FILE.")] = False,
    json: JsonOption = False,
) -> None:
    """Make a key to sign versions with, and print its public half.

    FILE is for the publisher alone (`deltawire publish --sign FILE`). Readers are given the public key (`--trust PUBKEY`), or a file with
    public keys, one per line: `deltawire keygen --public FILE >> trusted.keys`.
    """
    with exit_codes(json):
        from ...format.records.signing import SigningKey

        if public:
            key = load_signing_key(file, option="FILE")
        else:
            key = SigningKey.generate()
            key.save(file)
        if json:
            print_json({"file": str(file), "public": key.public})
        elif public:
            print_line(key.public)
        else:
            print_rows(str(file), [("public key", key.public), ("keep it", "secret: whoever has the file can sign in your name")])
