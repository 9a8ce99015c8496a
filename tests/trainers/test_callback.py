"""The callback runs in a real Hugging Face Trainer."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from tiny_models import bits, new_tokenizer, qwen, torch, transformers

pytest.importorskip("accelerate", reason="accelerate is not installed, which the Trainer needs")

from deltawire.chain.reader_options import ReaderOptions
from deltawire.errors import Fenced, PublisherClosed
from deltawire.events import tell_all
from deltawire.publish import Publisher
from deltawire.store import open_store
from deltawire.store.memory import MemoryStore
from deltawire.subscribe import Subscriber, reading_mirror
from deltawire.subscribe.model_files import read_model_files
from deltawire.telemetry.trackers import Tracker
from deltawire.trainers import DeltaWireCallback
from deltawire.trainers.trl import DeltaWireTransfer

TRAINER_WARNS = pytest.mark.filterwarnings("default", "ignore::deltawire.warnings.DenseUpdates", "ignore::deltawire.warnings.WideWeights")
"""deltawire does not cause the Trainer's warnings. These models are tiny and learn fast, so nearly all of their weights change."""


class Tokens(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = torch.arange(index, index + 8) % 96
        return {"input_ids": ids, "labels": ids}


def train(folder: Path, callback: Any, steps: int = 5, others: tuple[Any, ...] = ()) -> Any:
    model = qwen(0, dtype=torch.float32)
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy="no",
        dataloader_pin_memory=False,
    )
    transformers.Trainer(model, arguments, train_dataset=Tokens(), callbacks=[callback, *others]).train()
    return model


@TRAINER_WARNS
@pytest.mark.parametrize(("every", "steps"), [(1, [0, 1, 2, 3, 4, 5]), (2, [0, 2, 4, 5])])
def test_a_trainer_publishes_its_steps_and_the_last_one_in_any_case(tmp_path: Path, every: int, steps: list[int]) -> None:
    callback = DeltaWireCallback(tmp_path / "chain", every, dtype=torch.bfloat16, background=False)
    model = train(tmp_path / "out", callback)
    with Subscriber(tmp_path / "chain", tmp_path / "mirror") as subscriber:
        assert subscriber.sync().step == 5
        log = subscriber._chain.log
        found = [log.version(seq).step for seq in range(1, len(steps) + 1)]
    assert found == steps
    with reading_mirror(tmp_path / "mirror") as checkpoint:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    assert bits(loaded.state_dict()) == bits({name: tensor.bfloat16() for name, tensor in model.state_dict().items()})


@TRAINER_WARNS
def test_in_the_background_the_last_step_arrives_before_training_returns(tmp_path: Path) -> None:
    class Renamed(transformers.TrainerCallback):
        """Change the configuration during training."""

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            model.config.rope_note = f"after step {state.global_step}"

    model = train(tmp_path / "out", DeltaWireCallback("memory://callback-background", dtype=torch.bfloat16), others=(Renamed(),))
    assert b'"rope_note": "after step 4"' in read_model_files(open_store("memory://callback-background")).files["config.json"]
    with Subscriber("memory://callback-background", options=ReaderOptions(pin=False)) as subscriber:
        assert subscriber.sync().step == 5
        expected = model.model.norm.weight.detach().bfloat16().view(torch.uint8).numpy().tobytes()
        assert subscriber.state["model.norm.weight"].tobytes() == expected


@TRAINER_WARNS
def test_a_trainer_that_is_fenced_off_stops(tmp_path: Path) -> None:
    store = open_store("memory://callback-fenced")

    class Usurper(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2:
                Publisher(store).close()

    with pytest.raises(Fenced):
        train(tmp_path / "out", DeltaWireCallback(store, dtype=torch.float32, background=False), others=(Usurper(),))


@TRAINER_WARNS
def test_the_last_version_arrives_when_training_raises(tmp_path: Path) -> None:
    gate = threading.Event()

    class Slow(MemoryStore):
        def put_if_absent(self, key: str, data: Any) -> None:
            if key.startswith("commit/") and threading.current_thread().name == "deltawire-publish":
                assert gate.wait(60)
            super().put_if_absent(key, data)

    class Breaks(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2:
                threading.Timer(0.05, gate.set).start()
                raise ZeroDivisionError

    store = Slow()
    with pytest.raises(ZeroDivisionError), DeltaWireCallback(store, dtype=torch.bfloat16) as callback:
        train(tmp_path / "out", callback, others=(Breaks(),))
    assert callback.publisher is None
    with Subscriber(store, options=ReaderOptions(pin=False)) as subscriber:
        assert subscriber.sync().step == 2


@TRAINER_WARNS
def test_a_callback_that_is_used_again_closes_the_publisher_before(tmp_path: Path) -> None:
    class Breaks(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            raise ZeroDivisionError

    with DeltaWireCallback("memory://callback-again", dtype=torch.bfloat16) as callback:
        with pytest.raises(ZeroDivisionError):
            train(tmp_path / "out", callback, others=(Breaks(),))
        first = callback.publisher
        assert first is not None
        train(tmp_path / "out", callback, steps=1)
    with pytest.raises(PublisherClosed):
        first.flush()


def test_a_tokenizer_that_changes_in_training_is_published_as_it_is() -> None:
    tokenizer = new_tokenizer()
    store, state = MemoryStore(), {"w": torch.zeros(2, dtype=torch.bfloat16)}
    with Publisher(store, tokenizer=tokenizer, attachments={"config.json": b"{}"}) as publisher:
        publisher.publish(state)
        tokenizer.chat_template = "NEW"
        publisher.publish(state)
        assert read_model_files(store).files["chat_template.jinja"] == b"NEW"
        tokenizer.add_tokens(["<new>"])
        publisher.publish(state)
        files = read_model_files(store).files
        assert b"<new>" in files["tokenizer.json"]
        # the tokenizer remembers these settings, but the user changed nothing
        tokenizer(["w1", "w1 w2"], padding=True, truncation=True, max_length=5)
        publisher.publish(state)
        assert read_model_files(store).files == files


def test_every_must_be_positive() -> None:
    with pytest.raises(ValueError, match="every"):
        DeltaWireCallback("memory://callback", 0)


class Joining(Tracker):
    def __init__(self) -> None:
        super().__init__()
        self.runs: list[str] = []
        self.logged: list[float] = []

    def join(self) -> None:
        self.runs.append(threading.current_thread().name)

    def close(self) -> None: ...

    def _log(self, metrics: dict[str, float], step: int | None, event: Any) -> None:
        assert self.runs, "an event came before the trainer's run was looked for"
        self.logged.append(metrics["deltawire/publish/bytes"])

    def _alert(self, title: str, text: str) -> None: ...


def test_trackers_join_the_run_of_trl_before_the_first_version() -> None:
    tracker = Joining()
    transfer = DeltaWireTransfer(MemoryStore(), engines=0, attachments={"config.json": b"{}"}, on_event=tell_all(tracker, None, print))
    assert tracker.runs == []
    for _ in range(2):  # TRL may ask again
        transfer.init_weight_transfer()
    assert tracker.runs == [threading.current_thread().name]
    transfer.send_weights(iter({"w": torch.zeros(100, dtype=torch.bfloat16)}.items()))
    assert tracker.logged
    transfer.destroy()


@TRAINER_WARNS
def test_trackers_join_the_run_of_the_trainer_when_training_begins(tmp_path: Path) -> None:
    tracker = Joining()
    train(tmp_path / "out", DeltaWireCallback(tmp_path / "chain", dtype=torch.bfloat16, on_event=tell_all(tracker, None, print)), steps=1)
    assert tracker.runs == [threading.current_thread().name]
    assert tracker.logged
