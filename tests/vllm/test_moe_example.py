"""examples/moe_grpo with a real vLLM: experts that the trainer has fused reach the server exactly, and so does the way back."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forked_example import EXAMPLES, run_example
from live_server import LiveServer
from model_memory import difference

import deltawire
from deltawire.chain.reader_options import ReaderOptions

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "docs"))

from markdown_blocks import ROOT, blocks_run_by

pytestmark = pytest.mark.slow

ARGUMENTS = ["--logprobs-mode", "processed_logprobs", "--enable-scale-out"]
STEPS = 3
MEMORY = "deltawire_test_memory"


def bits_of(checkpoint: Path) -> dict[str, Any]:
    """Return the bits of the parameters that transformers makes of a checkpoint, with fused experts."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    return {name: weight.detach().view(torch.int16).numpy().tobytes() for name, weight in model.named_parameters()}


def test_vllm_serves_what_the_trainer_has_fused_and_replay_reduces_the_mismatch(
    tmp_path: Path, serve: Callable[..., LiveServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(EXAMPLES / "moe_grpo")
    import tiny_moe

    server = serve(tiny_moe.save(tmp_path / "model"), arguments=ARGUMENTS).wait()
    at_first = server.routes.call_workers(MEMORY)
    (block,) = blocks_run_by("tests/vllm/test_moe_example.py", "docs/router-replay.md")
    _, script, *_ = shlex.split(block.text)
    smaller = ["--steps", STEPS, "--folder", tmp_path, "--server", server.url]
    printed = run_example("torch", ROOT / script, *smaller, environment={"XDG_CACHE_HOME": str(tmp_path / "cache")})

    steps = re.findall(r"step (\d+): reward \S+, (\S+)% of decisions replayed", printed)
    assert [int(step) for step, _ in steps][:STEPS] == list(range(1, STEPS + 1))
    assert all(float(replayed) > 75 for _, replayed in steps)  # the last token of each completion of 16 tokens has no record
    table = {line.split()[0]: line.split()[1:] for line in printed.splitlines() if re.match(r"(vllm|transformers) ", line)}
    assert set(table) == {"vllm", "transformers"}
    kl_without, kl_with = (sum(int(row[0]) * float(row[column]) for row in table.values()) for column in (2, 3))
    assert 0 < kl_with < kl_without

    trained = tmp_path / "trained"  # as the trainer's model has written it
    fresh = serve(trained, arguments=ARGUMENTS).wait()
    for initial, held, wanted in zip(at_first, server.routes.call_workers(MEMORY), fresh.routes.call_workers(MEMORY), strict=True):
        assert any("experts" in line for line in difference(held, initial))  # so the comparison would show experts that did not arrive
        assert difference(held, wanted) == []
    assert server.generate() == fresh.generate()

    deltawire.pull(str(tmp_path / "store"), tmp_path / "pulled", options=ReaderOptions(pin=False))
    assert bits_of(tmp_path / "pulled") == bits_of(trained)
