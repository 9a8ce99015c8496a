"""Provide a trainer and members that are small enough for tests, with a real model and tokenizer, and a reward that is learned quickly.

Importing this module skips the test file if torch or transformers is missing.
"""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_models import SIZES, qwen, torch

from deltawire.chain.reader_options import ReaderOptions
from deltawire.fleet.member import Member
from deltawire.fleet.options import FleetOptions
from deltawire.rl.generation import TransformersGenerator
from deltawire.rl.member import RewardScorer
from deltawire.rl.settings import GrpoSettings
from deltawire.rl.trainer import GrpoTrainer
from deltawire.store import Store

tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")

SETTINGS = GrpoSettings(prompts=4, num_generations=4, tasks=2, max_completion_length=6, learning_rate=1e-2, max_staleness=0, save_steps=2)
FLEET = FleetOptions(lease_seconds=30, poll_seconds=0.01, keep_steps=64)
PATIENT = replace(FLEET, lease_seconds=3600)
"""No lease expires, even on a busy machine, so members do every task exactly as often as it is offered."""
ROWS = [{"prompt": f"w{number} w{number + 1}"} for number in range(1, 40)]


def low_words(completions: list[str], **_: Any) -> list[float]:
    """Return the share of each completion's words that are one of w0 to w19."""
    words = [completion.split() for completion in completions]
    return [sum(int(word[1:]) < 20 for word in each) / max(1, len(each)) for each in words]


def tokenizer() -> Any:
    """Return a tokenizer with one token for each of the words w0 to w95."""
    from transformers import PreTrainedTokenizerFast

    words = tokenizers.models.WordLevel({f"w{number}": number for number in range(SIZES["vocab_size"])}, unk_token="w0")
    found = tokenizers.Tokenizer(words)
    found.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=found, unk_token="w0")


def attachments() -> dict[str, bytes]:
    """Return the files from which members build the model and its tokenizer."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer().save_pretrained(folder)
        model().config.save_pretrained(folder)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def model(seed: int = 0) -> Any:
    return qwen(seed, dtype=torch.float32, bos_token_id=None, eos_token_id=None)


def trainer(store: Any, checkpoints: Path | None, *, seed: int = 0, **options: Any) -> GrpoTrainer:
    options = {"settings": SETTINGS, "fleet": FLEET, "attachments": attachments(), **options}
    return GrpoTrainer(model(seed), ROWS, store, checkpoints=checkpoints, **options)


@contextlib.contextmanager
def members(store: Store, count: int = 1) -> Iterator[None]:
    """Run `count` members on threads. They wait for the chain, and leave when the context ends."""
    stop = threading.Event()
    errors: list[BaseException] = []

    def serve(name: str) -> None:
        try:
            generator = open_generator(store, name, stop)
            if generator is not None:
                with contextlib.closing(generator):
                    Member(store, generator, RewardScorer([low_words]), name=name, poll=0.01).run(stop)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=serve, args=(f"member-{number}",)) for number in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not errors, errors


def open_generator(store: Store, name: str, stop: threading.Event) -> TransformersGenerator | None:
    from deltawire.errors import DeltawireError

    while not stop.wait(0.01):
        try:
            return TransformersGenerator(store, options=ReaderOptions(reader=name), poll=0.01)
        except DeltawireError as error:  # there is no chain yet
            if not error.retryable:
                raise
    return None
