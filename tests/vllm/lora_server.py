"""The double of a server with LoRA adapters, and a clock."""

from __future__ import annotations

import json
from pathlib import Path

from deltawire.engines.vllm.driver.lora import CONFIG, WEIGHTS
from deltawire.engines.vllm.driver.routes import EngineUnreachable, RouteFailed
from deltawire.format.checkpoints.checkpoint import Checkpoint


class Clock:
    """A clock that tests set."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


FILES = {CONFIG: json.dumps({"peft_type": "LORA", "r": 8, "lora_alpha": 16}).encode()}


class Server:
    """Loads adapters as vLLM does: a name only once, and only if the files are there."""

    url = "http://127.0.0.1:1"

    def __init__(self, most: int | None = 4) -> None:
        self.most = most
        self.loaded: dict[str, str] = {"other": "/elsewhere"}
        self.calls: list[str] = []
        self.refuses = self.asleep = self.lost = False
        self.used: set[str] | None = set()
        """The adapters that requests use, by name, even if they were unloaded since. None if the server does not tell."""
        self._folders: dict[str, str] = {}

    def is_asleep(self) -> bool:
        return self.asleep

    def close(self) -> None:
        raise AssertionError("only the owner of a client closes it")

    def adapters(self) -> dict[str, str]:
        if self.lost:
            raise EngineUnreachable("no answer.")
        return dict(self.loaded)

    def most_adapters(self) -> int | None:
        return self.most

    def used_adapters(self) -> set[str] | None:
        return None if self.used is None else {self._folders[name] for name in self.used}

    def load_adapter(self, name: str, folder: str) -> None:
        if self.refuses or name in self.loaded:
            raise RouteFailed("/v1/load_lora_adapter", 400, "rank 64 is greater than max_lora_rank 16")
        assert json.loads((Path(folder) / CONFIG).read_bytes())["r"] == 8
        Checkpoint(Path(folder) / WEIGHTS)
        self.loaded[name] = self._folders[name] = folder
        self.calls.append(f"+{name}")

    def unload_adapter(self, name: str) -> None:
        if name not in self.loaded:
            raise RouteFailed("/v1/unload_lora_adapter", 404, "cannot be found")
        del self.loaded[name]
        self.calls.append(f"-{name}")
