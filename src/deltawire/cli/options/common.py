"""Options that commands of all kinds share."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import typer

JsonOption: TypeAlias = Annotated[
    bool, typer.Option("--json", help="Print the result, or the error, as one JSON object on stdout, and nothing else.")
]
JsonLinesOption: TypeAlias = Annotated[
    bool, typer.Option("--json", help="Print one JSON object per line on stdout, and errors in the same way.")
]
ThreadsOption: TypeAlias = Annotated[
    int | None, typer.Option("--threads", min=1, metavar="N", help="Use this many threads instead of one per core.", show_default=False)
]
ForceOption: TypeAlias = Annotated[bool, typer.Option("--force", help="Replace the output if it exists.")]
VerboseOption: TypeAlias = Annotated[
    bool, typer.Option("--verbose", "-v", help="Report every event, and every request to the store, on stderr.")
]
