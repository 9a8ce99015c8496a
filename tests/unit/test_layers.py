"""Each layer imports only the layers before it (docs/architecture.md), and these tests enforce that."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "deltawire"
LAYERS = [
    {"errors"},
    {"events", "dtypes", "addresses"},
    {"warnings", "telemetry"},
    {"codec"},
    {"format"},
    {"tensors"},
    {"quantise"},
    {"delta"},
    {"store"},
    {"chain"},
    {"publish", "subscribe"},
    {"relay"},
    {"fleet"},
    {"live"},
    {"planning"},
    {"dashboard"},
    {"engines"},
    {"gateway"},
    {"trainers"},
    {"rl"},
    {"testing", "cli"},
    {"__main__"},
]
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
NO_TORCH = {name for name, rank in RANK.items() if rank < RANK["engines"]}
USES_MODULES = {SOURCE / "tensors" / "module_tensors.py", SOURCE / "tensors" / "checkpoint_layout.py"}


def modules() -> list[Path]:
    return sorted(path for path in SOURCE.rglob("*.py") if path.parent != SOURCE or path.stem in RANK)


def layer_of(path: Path) -> str:
    return path.relative_to(SOURCE).with_suffix("").parts[0]


@functools.cache
def imported(path: Path) -> list[tuple[int, str, bool]]:
    """Return the line of each import, the absolute name, and whether it is imported as soon as the module is."""
    tree = ast.parse(path.read_text())
    package = ["deltawire", *path.relative_to(SOURCE).parent.parts]
    at_once = {id(node) for node in tree.body}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                found.append((node.lineno, name.name, id(node) in at_once))
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*start, *([node.module] if node.module else [])])
            for name in node.names:
                found.append((node.lineno, f"{base}.{name.name}", id(node) in at_once))
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_module_imports_only_what_stands_before_its_layer(path: Path) -> None:
    own = layer_of(path)
    for line, name, _ in imported(path):
        parts = name.split(".")
        if parts[0] != "deltawire" or len(parts) < 2 or parts[1] not in RANK or parts[1] == own:
            continue
        assert RANK[parts[1]] < RANK[own], f"{path.relative_to(SOURCE)}:{line} imports {name}"


ON_GPU = (SOURCE / "codec" / "gpu", SOURCE / "quantise" / "gpu")
TORCHLESS = [path for path in modules() if layer_of(path) in NO_TORCH and path.parent not in ON_GPU and path not in USES_MODULES]


@pytest.mark.parametrize("path", TORCHLESS, ids=lambda path: str(path.relative_to(SOURCE)))
def test_torch_is_not_imported_before_it_is_needed(path: Path) -> None:
    for line, name, at_once in imported(path):
        assert not (at_once and name.split(".")[0] in ("torch", "transformers", "vllm", "trl")), f"{path.relative_to(SOURCE)}:{line}"


def test_every_module_has_a_layer() -> None:
    folders = {path.name for path in SOURCE.iterdir() if path.is_dir() and any(path.rglob("*.py"))}
    files = {path.stem for path in SOURCE.glob("*.py")} - {"__init__"}
    assert folders | files == RANK.keys()


def test_only_one_module_loads_files_of_a_bucket_with_transformers():
    """Only that module imports the classes that can run a bucket's Python, and all its calls say trust_remote_code=False."""
    users = {
        path.relative_to(SOURCE).as_posix()
        for path in modules()
        for _, name, _ in imported(path)
        if name.startswith("transformers.") and name.rpartition(".")[2].startswith(("Auto", "GenerationConfig", "pipeline"))
    }
    assert users == {"engines/pretrained.py"}
    tree = ast.parse((SOURCE / "engines" / "pretrained.py").read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    loading = [ast.unparse(call) for call in calls if call.func.attr in ("from_pretrained", "from_config")]
    assert len(loading) == 4
    trusting = [call for call in loading if not call.startswith("GenerationConfig") and "**_LOCAL" not in call]
    assert trusting == ["AutoModelForCausalLM.from_config(config, trust_remote_code=False)"]


TESTS = {path.stem for path in (ROOT / "tests").rglob("*.py")}
PROGRAMS = sorted(path for folder in ("benchmarks", "examples") for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: str(path.relative_to(ROOT)))
def test_benchmarks_and_examples_import_neither_tests_nor_the_command_line(path: Path) -> None:
    tree = ast.parse(path.read_text())
    own = {other.stem for other in path.parent.glob("*.py")}
    names = [name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names]
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert not [name for name in names if name == "deltawire.cli" or name.startswith("deltawire.cli.")]
    assert not [name for name in names if name.partition(".")[0] in {"tests", *TESTS} - own]
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    assert "tests" not in texts, "the program builds a path to the tests"
