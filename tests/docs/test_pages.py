"""The programs of docs/engines.md and docs/fleet.md run as they are written, on a CPU, with a directory for a bucket."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from markdown_blocks import PAGES, ROOT, Block, blocks
from running_blocks import SUBSTITUTES, folder_with_models, run_python
from tiny_models import bits, torch, transformers

import deltawire

pytest.importorskip("accelerate", reason="the Hugging Face Trainer needs accelerate")


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with folder_with_models() as folder:
        yield folder


@pytest.fixture(autouse=True)
def inside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def to_run(page: str) -> list[Block]:
    return [block for block in blocks(ROOT / "docs" / page) if block.language == "python" and not block.is_compile_only]


def one_with(text: str, found: list[Block]) -> Block:
    """The one block that holds a text. Takes it off the list, so that a test sees which blocks nobody ran."""
    (block,) = [block for block in found if text in block.text]
    found.remove(block)
    return block


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set")  # torch, where there is no GPU
@pytest.mark.parametrize("model", ["tiny-model", "tiny-moe"])
def test_engines(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = to_run("engines.md")
    substitutes = {"s3://bucket/": f"./bucket-of-{model}/", "Qwen/Qwen3-0.6B": f"./{model}"}

    trained = run_python(one_with("DeltaWireCallback(", found), substitutes)
    capsys.readouterr()
    served = run_python(one_with("HotSwap(", found), substitutes)
    assert len(capsys.readouterr().out.splitlines()) == 10
    assert served["policy"].version.step == 4
    published = {name: tensor.bfloat16() for name, tensor in trained["model"].cpu().state_dict().items()}
    assert bits(served["model"].state_dict()) == bits(published)

    named = run_python(one_with("WeightSource(", found), substitutes)
    deltawire.pull(f"bucket-of-{model}/run-8", f"named-{model}")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(f"named-{model}", dtype="auto")
    assert bits(loaded.state_dict()) == bits(named["policy"].to(torch.bfloat16).state_dict())
    assert found == [], "nobody runs these blocks"


def test_fleet(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = to_run("fleet.md")
    Path("my_task.py").write_text(one_with("def reward(", found).text)
    monkeypatch.syspath_prepend(folder)
    Path("model").symlink_to("tiny-model")
    member, trainer = one_with("serve(", found), one_with("GrpoTrainer(", found)
    assert found == [], "nobody runs these blocks"

    serving = threading.Thread(target=run_python, args=(member,), daemon=True)
    serving.start()  # it waits for the run
    smaller = {
        "prompts=16": "prompts=2",
        "num_generations=8, tasks=8": "num_generations=2, tasks=2",
        "max_completion_length=256": "max_completion_length=4",
    }
    names: dict[str, Any] = run_python(trainer, {**SUBSTITUTES, **smaller, "until=1000": "until=2"})
    serving.join(60)
    assert not serving.is_alive(), "the member was told that the run is over"
    assert "'event': 'rollout-uploaded'" in capsys.readouterr().out
    assert names["trainer"].step == 2


def test_nothing_says_that_the_package_is_on_pypi() -> None:
    texts = [*PAGES, *(ROOT / "src").rglob("*.py")]
    promises = re.compile(r"pip install ['\"]?deltawire|deltawire\[\w+\]['\"`]")
    assert [str(path.relative_to(ROOT)) for path in texts if promises.search(path.read_text(encoding="utf-8"))] == []
