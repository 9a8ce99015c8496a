"""Reads from the attachments of weights what their model can be trained on."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from ..errors import EngineError, UnusableModelFiles
from ..fleet.rules.training_limits import TrainingLimits
from ..subscribe.model_files import ModelFiles
from .pretrained import load_config
from .prompts import Prompts
from .routed_experts import routers_of_files


def load_prompts(files: ModelFiles) -> Prompts:
    """Return the tokenizer that members will use. Raises `UnusableModelFiles` if it is missing or cannot be loaded."""
    if "config.json" not in files.files:
        raise UnusableModelFiles("the chain has no attachment config.json.")
    try:
        return Prompts.of(files)
    except EngineError as error:
        raise UnusableModelFiles(error.message) from error


def limits_of_files(files: ModelFiles) -> TrainingLimits:
    """Return the sizes of vocabulary, context and routers, and the tokenizer's encoding. Raises `UnusableModelFiles`."""
    prompts = load_prompts(files)
    with tempfile.TemporaryDirectory(prefix="deltawire-config-") as folder:
        try:
            config = load_config(files.write(Path(folder)))
        except EngineError as error:
            raise UnusableModelFiles(error.message) from error
    routers = routers_of_files(files)
    layout = None if routers is None else routers.layout
    return TrainingLimits(_size(config, "vocab_size"), positions_of(config), prompts.encode, layout)


def positions_of(config: Any) -> int | None:
    """Return the largest number of tokens that a model with this config accepts. None if the config does not tell."""
    return _size(config, "max_position_embeddings")


def _size(config: Any, name: str) -> int | None:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    size = getattr(text, name, None)
    return size if isinstance(size, int) and size > 0 else None
