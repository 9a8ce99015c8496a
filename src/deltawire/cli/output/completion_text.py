"""Token ids as text, with the tokenizer that is published beside the weights. Runs no code from the store, and needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from ...store import Store

Decode: TypeAlias = Callable[[Sequence[int]], str]


def open_decoder(store: Store, run: str | None, trusted_keys: Collection[str]) -> tuple[Decode | None, str]:
    """Return what makes text of token ids; or None and the reason why there is nothing."""
    from ...chain.reader_options import ReaderOptions
    from ...subscribe.model_files import read_model_files

    try:
        import tokenizers
    except ImportError:
        return None, "the package tokenizers is not installed: pip install tokenizers"
    data = read_model_files(store, options=ReaderOptions(run=run, trusted_keys=trusted_keys)).files.get("tokenizer.json")
    if data is None:
        return None, "no tokenizer.json is published beside the weights: publish with attachments"
    try:
        tokenizer = tokenizers.Tokenizer.from_str(data.decode())
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library panics on some files, which is no Exception
        return None, f"the tokenizer.json that is published beside the weights cannot be read ({error})"

    def decode(ids: Sequence[int]) -> str:
        try:
            return str(tokenizer.decode(list(ids), skip_special_tokens=True))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:
            return tokens_as_text(ids)

    return decode, ""


def tokens_as_text(ids: Sequence[int]) -> str:
    """Token ids as they are."""
    return " ".join(map(str, ids))
