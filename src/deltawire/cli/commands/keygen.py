"""`deltawire keygen FILE`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..options.chain import load_signing_key
from ..options.common import JsonOption
from ..output.terminal import print_json, print_line, print_rows
from ..process.exit_codes import exit_codes


def keygen(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Write the secret key to this file, which must not exist yet.", show_default=False)
    ],
    public: Annotated[bool, typer.Option("--public", help="Make no key, but print the public key of the one in FILE.")] = False,
    json: JsonOption = False,
) -> None:
    """Make a key to sign versions with, and print its public key.

    Only the publisher has FILE (`deltawire publish --sign FILE`). Readers get the public key (`--trust PUBKEY`), or a file with public
    keys, one per line: `deltawire keygen --public FILE >> trusted.keys`.
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
            print_rows(
                "a new key",
                [
                    ("public key", key.public),
                    ("for readers", "they need only the public key: --trust PUBKEY"),
                    ("secret key", f"in the file {file}"),
                    ("keep secret", "this file, not the public key: everyone who has it can sign versions in your name"),
                ],
            )
