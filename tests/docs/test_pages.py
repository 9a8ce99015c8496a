"""Every program and every command on our pages runs as it is written, with a directory as the bucket and tiny models."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from markdown_blocks import LANGUAGES, PAGES, REASONS, ROOT, Block, blocks
from running_blocks import SUBSTITUTES, folder_with_models, run_block, run_python, run_shell
from tiny_models import bits, torch, transformers

import deltawire
from deltawire.errors import DeltawireError
from deltawire.trainers import adapter_files, adapter_weights

pytest.importorskip("accelerate", reason="the Hugging Face Trainer needs accelerate")
pytest.importorskip("peft", reason="LoRA adapters need peft")
load_file = pytest.importorskip("safetensors.torch").load_file

NOT_RUN = 5
"""The number of blocks that are marked as not run. Lower it when one of them is run. Raise it only for a block that cannot run."""
IN_A_TEST_OF_ITS_OWN = {"README.md", "docs/train.md", "docs/serve.md", "docs/fleet.md", "docs/live.md", "docs/fuzzing.md"}


@pytest.fixture(scope="module")
def models() -> Iterator[Path]:
    with folder_with_models() as folder:
        yield folder


@pytest.fixture
def folder(models: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make an empty folder for one page, with the models in it."""
    folder = models / f"page-{len(list(models.iterdir()))}"
    folder.mkdir()
    for model in ("tiny-model", "tiny-moe", "checkpoint", "next-checkpoint"):
        (folder / model).symlink_to(models / model)
    monkeypatch.chdir(folder)
    return folder


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def to_run(page: str) -> list[Block]:
    return [block for block in blocks(ROOT / page) if block.is_run]


def one_with(text: str, found: list[Block]) -> Block:
    """Return the one block that contains a text. Remove it from the list, so that a test sees which blocks no test ran."""
    (block,) = [block for block in found if text in block.text]
    found.remove(block)
    return block


@pytest.mark.parametrize("page", [page for page in map(name_of, PAGES) if page not in IN_A_TEST_OF_ITS_OWN and to_run(page)])
def test_every_block_of_a_page_runs(page: str, folder: Path) -> None:
    for block in to_run(page):
        run_block(block, folder)


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set")  # torch warns about it if there is no GPU
@pytest.mark.parametrize("model", ["tiny-model", "tiny-moe"])
def test_train_and_serve(model: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    training, serving = to_run("docs/train.md"), to_run("docs/serve.md")
    substitutes = SUBSTITUTES | {"Qwen/Qwen3-0.6B": f"./{model}"}

    run_python(one_with("background=True", training), substitutes)
    trained = run_python(one_with("DeltaWireCallback(", training), substitutes)
    live = run_python(one_with("LiveTraffic(", training), substitutes)
    assert live["traffic"].counts == {}  # it is for a trainer
    capsys.readouterr()
    served = run_python(one_with("ModuleEngine(", serving), substitutes)
    assert sum(line.startswith("[4] ") for line in capsys.readouterr().out.splitlines()) == 10  # a model may generate line breaks, too
    assert served["policy"].version.step == 4
    published = {name: tensor.bfloat16() for name, tensor in trained["model"].cpu().state_dict().items()}
    assert bits(served["model"].state_dict()) == bits(published)
    mirrored = run_python(one_with("Subscriber(", serving), substitutes)
    assert bits(mirrored["engine"].state_dict()) == bits(published)
    run_python(one_with("DiskEngine(", serving), substitutes)
    adapter = run_python(one_with("adapter_files(", serving), substitutes)
    deltawire.pull("bucket/math", "adapter")
    assert bits(load_file("adapter/model.safetensors")) == bits(adapter_weights(adapter["policy"]))
    assert Path("adapter/adapter_config.json").read_bytes() == adapter_files(adapter["policy"])["adapter_config.json"]

    with monkeypatch.context() as torchrun:
        for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
            torchrun.setenv(name, value)
        sharded = run_python(one_with("fully_shard(", training), substitutes)
    deltawire.pull("bucket/fsdp", "sharded")
    loaded = transformers.AutoModelForCausalLM.from_pretrained("sharded", dtype="auto")
    local = {name: tensor.to_local() for name, tensor in sharded["model"].state_dict().items()}
    assert bits(loaded.state_dict()) == bits({name: tensor.bfloat16() for name, tensor in local.items()})

    named = run_python(one_with("WeightSource(", training), substitutes)
    deltawire.pull("bucket/run-8", "named")
    loaded = transformers.AutoModelForCausalLM.from_pretrained("named", dtype="auto")
    assert bits(loaded.state_dict()) == bits(named["policy"].to(torch.bfloat16).state_dict())
    assert training + serving == [], "no test runs these blocks"


@contextmanager
def ends_when_published(url: str) -> Iterator[None]:
    """Send this process SIGTERM, for which a program inside has a handler, as soon as the first version is published."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    ended = threading.Event()

    def end() -> None:
        while not ended.wait(0.05):
            with suppress(DeltawireError):
                deltawire.pull(url, "published")
                os.kill(os.getpid(), signal.SIGTERM)
                return

    waiting = threading.Thread(target=end)
    waiting.start()
    try:
        yield
    finally:
        ended.set()
        waiting.join()
        for number, handler in handlers.items():
            signal.signal(number, handler)


def test_live_traffic_with_the_tiny_model_of_the_page(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = to_run("docs/live.md")
    run_python(one_with("Qwen3Config(", found))
    run_shell(one_with("deltawire publish tiny runs/tiny", found), folder)
    substitutes = SUBSTITUTES | {"Qwen/Qwen3-0.6B": "./tiny"}
    hide = run_python(one_with("def hide(", found))["hide"]
    shown = {"messages": [{"role": "user", "content": "w1 12345"}], "answer": "w2", "tags": {}, "route": "chat", "model": "-"}
    assert hide(shown) == {**shown, "messages": [{"role": "user", "content": "w1 #"}]}
    assert hide({**shown, "tags": {"private": "yes"}}) is None
    run_python(one_with("with Publisher(", found), substitutes)
    with ends_when_published("bucket/service"):
        service = run_python(one_with("stop.is_set", found), substitutes)
    assert service["trainer"].step == 0
    assert list(Path("checkpoints").iterdir()) != []
    loop = run_python(one_with("GrpoTrainer(", found), substitutes)
    assert loop["trainer"].step == 1
    assert "step 1 has learned from 8 answers" in capsys.readouterr().out
    assert deltawire.pull("bucket/loop", "trained").step == 1
    assert found == [], "no test runs these blocks"


def test_fleet(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = to_run("docs/fleet.md")
    Path("my_task.py").write_text(one_with("def reward(", found).text)
    monkeypatch.syspath_prepend(folder)
    Path("model").symlink_to("tiny-model")
    member, trainer = one_with("serve(", found), one_with("GrpoTrainer(", found)

    serving = threading.Thread(target=run_python, args=(member,), daemon=True)
    serving.start()  # the member waits for the run
    smaller = {
        "prompts=16": "prompts=2",
        "num_generations=8, tasks=8": "num_generations=2, tasks=2",
        "max_completion_length=256": "max_completion_length=4",
    }
    names: dict[str, Any] = run_python(trainer, {**SUBSTITUTES, **smaller, "until=1000": "until=2"})
    serving.join(600)
    assert not serving.is_alive(), "the member was told that the run is over"
    assert "'event': 'rollout-uploaded'" in capsys.readouterr().out
    assert names["trainer"].step == 2

    run_shell(one_with("deltawire members", found), folder)
    run_shell(one_with("deltawire member ", found), folder, warm_up="torch")  # the run is over, so the members leave at once
    run_shell(one_with("deltawire fleet 8", found), folder, SUBSTITUTES | {"fleet 8": "fleet 1"}, warm_up="torch")
    assert found == [], "no test runs these blocks"


def test_fuzzing_of_chains() -> None:
    found = to_run("docs/fuzzing.md")
    installed = f"VENV=unused -o unused/.installed BIN={Path(sys.executable).parent}"  # make installs nothing, and runs this Python
    smaller = {"make fuzz-chains CHAINS=5000": f"make {installed} fuzz-chains CHAINS=3"}
    run_shell(one_with("make fuzz-chains", found), ROOT, smaller)
    assert found == [], "no test runs these blocks"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_is_what_it_says(page: Path) -> None:
    for block in blocks(page):
        assert block.language in LANGUAGES, f"{block}: name one of the languages {LANGUAGES}"
        assert block.not_run is None or block.not_run in REASONS, f"{block}: {block.not_run!r} is not a reason that counts"
        if block.language == "python":
            compile(block.text, str(block), "exec")
        if block.language == "json":
            json.loads(block.text)
        if block.language == "text":
            assert not re.search(r"^(\$ |deltawire [a-z]+ |pip |make |import |from \S+ import )", block.text, re.MULTILINE), (
                f"{block} is code"
            )


def takes_blocks_of(test: str, page: str) -> bool:
    """Return whether a test file names a page, and asks by its own path for the blocks that it runs."""
    nodes = list(ast.walk(ast.parse((ROOT / test).read_text(encoding="utf-8"))))
    names = [node.value for node in nodes if isinstance(node, ast.Constant)]
    calls = [node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    return page in names and any(ast.unparse(call).startswith(f"blocks_run_by({test!r}, ") for call in calls)


def test_a_test_that_only_names_a_page_does_not_run_its_blocks() -> None:
    assert takes_blocks_of("tests/vllm/test_page.py", "docs/fleet.md")
    assert not takes_blocks_of("tests/vllm/test_page.py", "docs/live.md")
    assert not takes_blocks_of("tests/docs/test_pages.py", "docs/fleet.md")


def test_blocks_that_others_run_are_known_to_them() -> None:
    for page in PAGES:
        for block in blocks(page):
            if block.run_by is not None:
                assert takes_blocks_of(block.run_by, name_of(page)), f"{block}: {block.run_by} does not run it"
            if block.excerpt_of is not None:
                lines = iter(line.strip() for line in (ROOT / block.excerpt_of).read_text(encoding="utf-8").splitlines())
                strange = [line for line in map(str.strip, block.text.splitlines()) if line and line not in lines]
                assert strange == [], f"{block}: not in {block.excerpt_of}, in this order"


def test_the_blocks_that_are_not_run_are_counted() -> None:
    marked = [block for page in PAGES for block in blocks(page) if block.not_run is not None]
    assert len(marked) == NOT_RUN, "\n".join(f"{block}: {block.not_run}" for block in marked)


def test_nothing_says_that_the_package_is_on_pypi() -> None:
    texts = [*PAGES, *(ROOT / "src").rglob("*.py")]
    promises = re.compile(r"pip install ['\"]?deltawire|deltawire\[\w+\]['\"`]")
    assert [name_of(path) for path in texts if promises.search(path.read_text(encoding="utf-8"))] == []
