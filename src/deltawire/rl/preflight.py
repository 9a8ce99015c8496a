"""What can be checked before a run begins, so that it does not fail, or wait for ever, in the middle: model files, rows, lengths."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from ..engines.model_limits import positions_of
from ..engines.prompts import Prompts
from ..errors import EngineError, NoChain, UnusableModelFiles, UnusableRows
from ..fleet.training_limits import TrainingLimits
from ..format.fleet_files import Row
from ..publish.attachments import Attachments, read_attachments
from ..store import Store
from ..subscribe.model_files import ModelFiles, read_model_files

_NAMED = 3
"""Largest number of rows that an error names."""


def read_files(store: Store, attachments: Attachments | None, *, run: str | None = None, trusted_keys: Collection[str] = ()) -> ModelFiles:
    """Return the files that members will build the model from: those that are given, or else those of the chain.

    Raises `UnusableModelFiles` if there are none.
    """
    if attachments is not None:
        return ModelFiles(read_attachments(attachments) or {}, {})
    try:
        return read_model_files(store, run=run, trusted_keys=trusted_keys)
    except NoChain:
        raise UnusableModelFiles("there is no config.json and no tokenizer to publish beside the weights.") from None


def training_limits(model: Any, prompts: Prompts) -> TrainingLimits:
    """Return what this model can be trained on: its vocabulary, its positions, and the prompts that rows have by this tokenizer."""
    config = getattr(model, "config", None)
    positions = None if config is None else positions_of(config)
    return TrainingLimits(vocabulary=_vocabulary(model), positions=positions, encode=prompts.encode)


def check_rows(rows: Sequence[Row], limits: TrainingLimits, max_completion_length: int) -> None:
    """Raise `UnusableRows` that names the first rows that cannot be sent to members, have no prompt, or are too long for the model."""
    found: list[str] = []
    count = 0
    for number, row in enumerate(rows):
        if (why := _why_unusable(row, limits, max_completion_length)) is not None:
            count += 1
            if len(found) < _NAMED:
                found.append(f"row {number}: {why}")
    if count:
        more = f" (and {count - len(found):,} more rows)" if count > len(found) else ""
        raise UnusableRows(f"{'; '.join(found)}{more}.")


def _why_unusable(row: Row, limits: TrainingLimits, max_completion_length: int) -> str | None:
    try:
        json.dumps(dict(row), allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        return f"it cannot be written as JSON ({error})"
    if "prompt" not in row:
        return f"it has no `prompt`, but {', '.join(map(str, row)) or 'nothing'}"
    try:
        (ids,) = limits.prompts_of([row]) or ((),)
    except EngineError as error:
        return error.message.rstrip(".")
    except Exception as error:  # a chat template raises whatever it likes
        return f"its prompt cannot be encoded ({type(error).__name__}: {error})"
    if limits.vocabulary is not None and any(not 0 <= token < limits.vocabulary for token in ids):
        return f"its prompt has tokens outside the model's vocabulary of {limits.vocabulary:,}"
    if limits.positions is not None and len(ids) + max_completion_length > limits.positions:
        return (
            f"its prompt has {len(ids):,} tokens, which with max_completion_length={max_completion_length:,} is more than the model's "
            f"{limits.positions:,} positions"
        )
    return None


def _vocabulary(model: Any) -> int | None:
    """The lower of how many tokens the model can read and how many it can write; None if it tells neither."""
    sizes = list(_embedding_sizes(model))
    return min(sizes) if sizes else None


def _embedding_sizes(model: Any) -> Iterator[int]:
    for name in ("get_input_embeddings", "get_output_embeddings"):
        ask = getattr(model, name, None)
        weight = getattr(ask(), "weight", None) if callable(ask) else None
        if weight is not None:
            yield int(weight.shape[0])
