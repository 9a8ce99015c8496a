"""Test that each version has the files of its tokenizer as they were when it was published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from attached_files import OPTIONS, states
from threads_as_ranks import run_ranks, shards_of

from deltawire.publish.publisher import Publisher
from deltawire.publish.sharded import ShardedPublisher
from deltawire.publish.writer_options import WriterOptions
from deltawire.store.memory import MemoryStore
from deltawire.subscribe.model_files import read_model_files


class FakeTokenizer:
    """The part of a tokenizer that the publisher needs. If it is `opaque`, only saving it shows whether it has changed."""

    def __init__(self, *, opaque: bool = False) -> None:
        self.template = "0"
        if opaque:
            self.backend = object()

    def save_pretrained(self, folder: str) -> None:
        (Path(folder) / "chat_template.jinja").write_text(self.template)


@pytest.mark.parametrize("opaque", [False, True])
@pytest.mark.parametrize("background", [False, True])
def test_the_tokenizer_is_taken_as_it_is_at_every_version(tmp_path: Path, opaque: bool, background: bool) -> None:
    store, tokenizer = MemoryStore(), FakeTokenizer(opaque=opaque)
    with Publisher(store, tokenizer=tokenizer, background=background, options=OPTIONS) as publisher:
        for number, state in enumerate(states(3)):
            tokenizer.template = f"template {number}"
            publisher.publish(state)
            tokenizer.template = "not published"
            publisher.flush()
            assert read_model_files(store).files == {"chat_template.jinja": f"template {number}".encode()}


def test_ranks_that_publish_together_take_the_tokenizer_as_it_is() -> None:
    store, tokenizer, weights = MemoryStore(), FakeTokenizer(), states(2)

    def work(ranks: Any) -> None:
        with ShardedPublisher(ranks, store, options=WriterOptions(threads=1), tokenizer=tokenizer) as publisher:
            for state in weights:
                publisher.publish(shards_of(state, ranks.rank, ranks.size))
                if ranks.rank == 0:
                    tokenizer.template = "new"

    assert run_ranks(2, work) == [None, None]
    assert read_model_files(store).files == {"chat_template.jinja": b"new"}


class TemplatedTokenizer:
    """A tokenizer that saves its chat template only if it has one, as real tokenizers do."""

    template: str | None = "old"

    def save_pretrained(self, folder: str) -> None:
        (Path(folder) / "tokenizer_config.json").write_text("{}")
        if self.template is not None:
            (Path(folder) / "chat_template.jinja").write_text(self.template)


@pytest.mark.parametrize("resumed", [False, True])
def test_a_chat_template_is_removed_when_the_tokenizer_no_longer_has_it(resumed: bool) -> None:
    """Files that did not come from a tokenizer stay."""
    store, tokenizer, weights = MemoryStore(), TemplatedTokenizer(), states(2)
    others = {"README.md": b"text", "vocab.txt": b"words"}
    with Publisher(store, attachments={**others, "chat_template.jinja": b"older"}, options=OPTIONS) as publisher:
        publisher.publish(weights[0])
    with Publisher(store, tokenizer=tokenizer, options=OPTIONS) as publisher:
        if not resumed:
            publisher.publish(weights[0])
            assert read_model_files(store).files["chat_template.jinja"] == b"old"
        tokenizer.template = None
        publisher.publish(weights[1])
    assert read_model_files(store).files == {**others, "tokenizer_config.json": b"{}"}


def test_ranks_remove_a_chat_template_that_the_tokenizer_no_longer_has() -> None:
    store, tokenizer, weights = MemoryStore(), TemplatedTokenizer(), states(2)

    def work(ranks: Any) -> None:
        with ShardedPublisher(ranks, store, options=WriterOptions(threads=1), tokenizer=tokenizer) as publisher:
            for state in weights:
                publisher.publish(shards_of(state, ranks.rank, ranks.size))
                tokenizer.template = None

    assert run_ranks(1, work) == [None]
    assert read_model_files(store).files == {"tokenizer_config.json": b"{}"}


@pytest.mark.parametrize("wrong", ["model", Path("model"), 7])
def test_a_value_that_is_no_tokenizer_is_refused_at_once(wrong: Any) -> None:
    store = MemoryStore()
    with pytest.raises(TypeError, match="AutoTokenizer"):
        Publisher(store, tokenizer=wrong)
    assert list(store.list("")) == []
