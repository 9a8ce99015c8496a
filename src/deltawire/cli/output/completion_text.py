"""Token ids as text, by the tokenizer that is published with the weights. Runs no code from the store, and needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from ...chain.reader_options import ReaderOptions
    from ...store import Store

Decode: TypeAlias = Callable[[Sequence[int]], str]


def open_decoder(store: Store, options: ReaderOptions) -> tuple[Decode | None, str]:
    """Return a function that turns token ids into text; or None and the reason why there is no such function."""
    from ...subscribe.model_files import read_model_files

    try:
        import tokenizers
    except ImportError:
        return None, "the package tokenizers is not installed. Run: pip install tokenizers"
    data = read_model_files(store, options=options).files.get("tokenizer.json")
    if data is None:
        return None, "no tokenizer.json is published with the weights. Publish it as an attachment"
    try:
        tokenizer = tokenizers.Tokenizer.from_str(data.decode())
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library panics on some files, and a panic is not an Exception
        return None, f"the published tokenizer.json cannot be read ({error})"

    def decode(ids: Sequence[int]) -> str:
        try:
            return str(tokenizer.decode(list(ids), skip_special_tokens=True))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:
            return tokens_as_text(ids)

    return decode, ""


def tokens_as_text(ids: Sequence[int]) -> str:
    """Return token ids as numbers."""
    return " ".join(map(str, ids))
