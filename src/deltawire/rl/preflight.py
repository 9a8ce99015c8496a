"""Checks before a run begins: model files, rows and lengths. Without them a run would fail or hang later."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..chain.reader_options import ReaderOptions
from ..engines.model_limits import positions_of
from ..engines.prompts import Prompts
from ..errors import EngineError, NoChain, UnusableModelFiles, UnusableRows, UnusableSettings
from ..fleet.rules.training_limits import TrainingLimits
from ..format.records.fleet_files import Row
from ..publish.attachments.model_files import TokenizerFiles, files_of_model
from ..publish.attachments.read_files import Attachments, read_attachments
from ..store import Store
from ..subscribe.model_files import ModelFiles, read_model_files
from ..tensors.casting import Casting
from .routing.routing_recorder import layout_of_model

_NAMED = 3
"""An error names at most this many rows."""


def read_files(store: Store, attachments: Attachments | None, *, options: ReaderOptions | None = None) -> ModelFiles:
    """Return the files that members build the model from: `attachments` if given, otherwise those of the chain.

    Raises `UnusableModelFiles` if there are none.
    """
    if attachments is not None:
        return ModelFiles(read_attachments(attachments) or {}, {})
    try:
        return read_model_files(store, options=options)
    except NoChain:
        raise UnusableModelFiles("there is no config.json and no tokenizer to publish with the weights.") from None


def files_with_tokenizer(model: Any, tokenizer: Any, attachments: Attachments | None, dtype: Any) -> dict[str, bytes]:
    """Return the files of the model and of its tokenizer. `attachments` replace files of the same names."""
    own = {**files_of_model(model, Casting(dtype).dtype), **TokenizerFiles(tokenizer).read()}
    return {**own, **(read_attachments(attachments) or {})}


def training_limits(model: Any, prompts: Prompts) -> TrainingLimits:
    """Return the limits of this model: its vocabulary, its positions, how this tokenizer encodes prompts, and its routers."""
    config = getattr(model, "config", None)
    positions = None if config is None else positions_of(config)
    return TrainingLimits(_vocabulary(model), positions, prompts.encode, routers=layout_of_model(model))


def check_rows(rows: Sequence[Row], limits: TrainingLimits, max_completion_length: int) -> None:
    """Raise `UnusableRows` for rows that are not JSON, have no prompt, or are too long for the model. The error names the first ones.

    Raises `UnusableSettings` if a completion of the largest length does not fit after any prompt.
    """
    used = [_tokens_of(row, limits) for row in rows]
    lengths = [(each, number) for number, each in enumerate(used) if isinstance(each, int)]
    room = None if limits.positions is None else limits.positions - max_completion_length
    if room is not None and lengths and len(lengths) == len(rows) and min(lengths)[0] > room:
        shortest, where = min(lengths)
        raise UnusableSettings(
            f"max_completion_length={max_completion_length:,} is too large for the model's {limits.positions:,} positions: "
            f"even the shortest prompt (row {where}) has {shortest:,} tokens."
        )
    bad = [(number, why) for number, each in enumerate(used) if (why := _why_unusable(each, room, max_completion_length)) is not None]
    if bad:
        named = "; ".join(f"row {number}: {why}" for number, why in bad[:_NAMED])
        more = f" (and {len(bad) - _NAMED:,} more rows)" if len(bad) > _NAMED else ""
        raise UnusableRows(f"{named}{more}.")


def _why_unusable(used: int | str, room: int | None, max_completion_length: int) -> str | None:
    if isinstance(used, str) or room is None or used <= room:
        return used if isinstance(used, str) else None
    positions = room + max_completion_length
    return (
        f"its prompt has {used:,} tokens, which with max_completion_length={max_completion_length:,} is more than the model's "
        f"{positions:,} positions"
    )


def _tokens_of(row: Row, limits: TrainingLimits) -> int | str:
    """Return how many tokens the prompt of a row has, or why the row cannot be used."""
    if not isinstance(row, Mapping):
        return f"its type is {type(row).__name__}, but a row must be a mapping with a `prompt`"
    try:
        json.dumps(dict(row), allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        return f"it cannot be written as JSON ({error})"
    if "prompt" not in row:
        return f"it has no `prompt`; its columns are {', '.join(map(str, row)) or 'none'}"
    try:
        (ids,) = limits.prompts_of([row]) or ((),)
    except EngineError as error:
        return error.message.rstrip(".")
    except Exception as error:  # a chat template can raise anything
        return f"its prompt cannot be encoded ({type(error).__name__}: {error})"
    if limits.vocabulary is not None and any(not 0 <= token < limits.vocabulary for token in ids):
        return f"its prompt has tokens outside the model's vocabulary of {limits.vocabulary:,}"
    if limits.positions is not None and len(ids) >= limits.positions:
        return f"its prompt has {len(ids):,} tokens, which leaves no room for a completion in the model's {limits.positions:,} positions"
    return len(ids)


def _vocabulary(model: Any) -> int | None:
    """Return the smaller of the input and output vocabularies, or None if the model has neither."""
    sizes = list(_embedding_sizes(model))
    return min(sizes) if sizes else None


def _embedding_sizes(model: Any) -> Iterator[int]:
    for name in ("get_input_embeddings", "get_output_embeddings"):
        ask = getattr(model, name, None)
        weight = getattr(ask(), "weight", None) if callable(ask) else None
        if weight is not None:
            yield int(weight.shape[0])
