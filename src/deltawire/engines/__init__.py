"""Engines that generate, and how they get new weights while they do.

    base.py            what every engine must be able to do
    hot_swap.py        follows a chain and keeps an engine at its newest version
    swap/              one swap: pause, apply, confirm, resume, and what happens if a step fails
    module.py          transformers models and other modules in this process
    weights/           the live weights of a module, changed in place or through a copy on the host
    disk.py            engines that load checkpoints from a directory
    sglang.py          SGLang servers
    vllm/              vLLM servers
    http_session.py    requests to the HTTP server of an engine
    answer_table.py    what the engine drew for each answer, kept for a short time
    sampling_changes.py    which parameters of a request change what is drawn
    routed_experts.py  routed experts in the answers of vLLM and SGLang
    pretrained.py      loads config and tokenizer from the files of a chain
    prompts.py         rows of a dataset as token ids
    model_limits.py    what a model can be trained on

An adapter is imported when it is first used, because most of them need a library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ..subscribe.prepared_swap import PreparedSwap, Swap
from .base import Engine, KvCache
from .hot_swap import HotSwap
from .swap.live_intervals import Attribution, LiveInterval
from .swap.swap_controller import SwapRecord

if TYPE_CHECKING:
    from .disk import DiskEngine as DiskEngine
    from .module import ModuleEngine as ModuleEngine
    from .sglang import SglangEngine as SglangEngine

__all__ = [
    "Attribution",
    "DiskEngine",
    "Engine",
    "HotSwap",
    "KvCache",
    "LiveInterval",
    "ModuleEngine",
    "PreparedSwap",
    "SglangEngine",
    "Swap",
    "SwapRecord",
]

_LATER = {"DiskEngine": ".disk", "ModuleEngine": ".module", "SglangEngine": ".sglang"}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LATER[name], __name__), name)
