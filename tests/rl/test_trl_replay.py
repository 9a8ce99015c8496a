"""TRL's real AsyncGRPO, on a CPU, replays the experts of its samples. The worker that makes the samples is a double."""

from __future__ import annotations

import base64
import importlib.util
import io
import queue
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from moe_models import another_routing, moe_model
from tiny_models import bits, new_tokenizer, qwen, torch

from deltawire.errors import UnsupportedRouting
from deltawire.rl.routing.router_replay import RouterReplay

for library in ("trl", "vllm", "datasets", "aiohttp"):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"TRL's AsyncGRPO needs {library} to be installed", allow_module_level=True)

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent / "examples" / "trl_vllm_over_bucket"), str(TESTS / "docs")]

with warnings.catch_warnings():  # TRL warns that these imports may change, and about versions of vLLM
    warnings.simplefilter("ignore")
    import on_cpu
    from datasets import Dataset
    from markdown_blocks import blocks_run_by
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing

    from deltawire.trainers.trl_samples import LabelledSample, RecordedTurn

pytestmark = pytest.mark.filterwarnings("ignore:TRL currently supports vLLM")


def on_the_page() -> Any:
    """Return the trainer that docs/router-replay.md defines."""
    (block,) = blocks_run_by("tests/rl/test_trl_replay.py", "docs/router-replay.md")
    names: dict[str, Any] = {"__name__": "on_the_page"}
    exec(block.text, names)
    return names["Trainer"]


Replaying = on_the_page()


class Worker:
    """Hands over samples that were made before."""

    def __init__(self, samples: list[LabelledSample]) -> None:
        self.rollout_buffer: queue.Queue[LabelledSample] = queue.Queue()
        self.metrics_queue: queue.Queue[Any] = queue.Queue()
        for sample in samples:
            self.rollout_buffer.put(sample)

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def update_model_version(self, model_version: int) -> None: ...

    def check_health(self, stale_after_s: float) -> None:
        raise RuntimeError("the trainer wants more samples than there are")


class NoTransfer:
    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((packing, "_flash_attn"), (async_grpo_trainer, "get_peak_flops_per_device")):
        monkeypatch.setattr(module, name, getattr(module, name))  # so that it is restored
    on_cpu.replace_what_needs_a_gpu()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    moe_model("qwen3_moe").save_pretrained(tmp_path / "model")
    new_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


SEQUENCES = [([1, 2, 3], [10, 11, 12, 13]), ([1, 2, 3], [10, 14, 15]), ([4, 5], [16, 17, 18, 19, 20]), ([4, 5], [21])]


def made(experts: Any = lambda ids, number: None) -> list[LabelledSample]:
    """Return two groups of two samples. Samples of a group share the tokens of their prompt, and the first two also a further one."""
    samples = []
    for number, (prompt, completion) in enumerate(SEQUENCES):
        ids = np.array(prompt + completion)
        mask = np.array([0] * len(prompt) + [1] * len(completion))
        samples.append(
            LabelledSample(
                prompt=[{"role": "user", "content": ""}],
                completion=[{"role": "assistant", "content": ""}],
                input_ids=ids,
                completion_mask=mask,
                old_log_probs=(-2.0 * mask).astype(np.float32),
                advantage=1.0 if number % 2 else -0.5,
                model_version=1,
                group_id=number // 2,
                metrics={"reward": 1.0},
                experts=experts(ids, number),
            )
        )
    return samples


def train(kind: Any, folder: Path, samples: list[LabelledSample], **config: Any) -> tuple[Any, dict[str, Any]]:
    """Train one step. Return the bits of the weights, and the metrics."""
    trainer = kind(
        model=str(folder),
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "w1"}]}]),
        processing_class=new_tokenizer(),
        args=AsyncGRPOConfig(
            output_dir=str(folder.parent / "out"),
            dtype="float32",
            use_cpu=True,
            bf16=False,
            max_steps=1,
            learning_rate=1e-3,
            num_generations=2,
            token_budget=0,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            **{"per_device_train_batch_size": 4, "gradient_checkpointing": False, **config},
        ),
        rollout_worker=Worker([*samples, *made(), *made()]),  # TRL reads further than it trains
        weight_transfer=NoTransfer(),
    )
    trainer.train()
    (logged,) = [entry for entry in trainer.state.log_history if "ratio" in entry]
    return bits(dict(trainer.model.named_parameters())), logged


def recorded(ids: Any, number: int) -> Any:
    with RouterReplay(MODEL) as replay, replay.record() as recording, torch.no_grad():
        MODEL(input_ids=torch.from_numpy(ids)[None])
        experts = recording.take()
    experts[-1] = -1  # as in vLLM's answers
    return experts


MODEL = moe_model("qwen3_moe")


@pytest.mark.usefixtures("on_a_cpu")
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    ],
)
def test_replay_of_the_policys_own_experts_changes_no_bit(folder: Path, config: Any):
    plain, _ = train(AsyncGRPOTrainer, folder, made(), **config)
    replayed, logged = train(Replaying, folder, made(recorded), **config)
    assert replayed == plain != bits(dict(MODEL.named_parameters()))
    assert logged["routing/differing_ratio"] == 0
    assert 0.7 < logged["routing/replayed_ratio"] < 1
    assert logged["routing/damaged_total"] == 0


@pytest.mark.usefixtures("on_a_cpu")
def test_other_experts_reach_their_tokens(folder: Path):
    used: list[tuple[list[int], list[int], Any]] = []

    class Watched(Replaying):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            with self.replay.record() as recording:
                loss = super().compute_loss(model, inputs, *args, **kwargs)
            used.append((inputs["input_ids"][0].tolist(), inputs["position_ids"][0].tolist(), recording.take()))
            return loss

    other = {number: another_routing((len(prompt + made), 2, 3), 8, number).numpy() for number, (prompt, made) in enumerate(SEQUENCES)}
    _, logged = train(Watched, folder, made(lambda ids, number: other[number]))
    assert logged["routing/replayed_ratio"] == 1
    ((ids, positions, experts),) = used
    for number, (prompt, completion) in enumerate(SEQUENCES):
        for place, token in enumerate(prompt + completion):
            shared = number % 2 and place < (3 if number == 1 else 1)  # the first sample of the group has these tokens too
            wanted = other[number - 1 if shared else number][place]
            found = [
                np.sort(row, -1).tolist() for each, at, row in zip(ids, positions, experts, strict=True) if (each, at) == (token, place)
            ]
            assert np.sort(wanted, -1).tolist() in found


@pytest.mark.usefixtures("on_a_cpu")
def test_experts_that_do_not_fit_are_left_out_and_counted(folder: Path):
    bad = {0: lambda rows: rows[:-1], 1: lambda rows: rows[..., :2], 2: lambda rows: rows + 8, 3: lambda rows: rows}
    plain, _ = train(AsyncGRPOTrainer, folder, made())
    replayed, logged = train(Replaying, folder, made(lambda ids, number: bad[number](recorded(ids, number))))
    assert replayed == plain
    assert logged["routing/unusable_total"] == 3
    assert 0 < logged["routing/replayed_ratio"] < 0.3
    assert train(Replaying, folder, made())[0] == plain  # samples without any


def sent(experts: Any) -> str:
    """Return experts as vLLM sends them: all decoder layers, without the last token."""
    file = io.BytesIO()
    np.save(file, experts[:-1].astype(np.uint8))
    return base64.b64encode(file.getvalue()).decode()


@pytest.mark.usefixtures("on_a_cpu")
def test_experts_from_trls_own_server_are_replayed(folder: Path):
    used: list[Any] = []

    class Watched(Replaying):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            used.append(inputs["experts"][0].clone().numpy())
            return super().compute_loss(model, inputs, *args, **kwargs)

    samples = made()
    other = another_routing((7, 2, 3), 8).numpy()
    first, whole = np.where(np.arange(7)[:, None, None] < 3, other, 7), other  # the second turn has rows of the first one's tokens, too
    samples[0].turns = (RecordedTurn(4, sent(first[:4])), RecordedTurn(7, sent(whole)))
    samples[1].turns = (RecordedTurn(6, sent(np.full((6, 2, 3), 9))),)  # the model has 8 experts
    samples[2].turns = (RecordedTurn(7, "no base64!"),)
    samples[3].turns = (RecordedTurn(3, sent(np.zeros((9, 2, 3)))),)
    _, logged = train(Watched, folder, samples)
    assert logged["routing/unusable_total"] == 3
    (experts,) = used
    assert experts[:6].tolist() == other[:6].tolist()
    assert (experts[6:] == -1).all()


@pytest.mark.usefixtures("on_a_cpu")
def test_a_dense_model_is_refused(tmp_path: Path):
    qwen(dtype=torch.float32).save_pretrained(tmp_path / "dense")
    with pytest.raises(UnsupportedRouting, match="names no router class"):
        train(Replaying, tmp_path / "dense", made())
