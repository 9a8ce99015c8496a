"""Samples of TRL's AsyncGRPO carry the versions that made them. The server is a double; tests/vllm/test_trl.py has a real one."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import pickle
import threading
import warnings
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from deltawire.chain.version import Version
from deltawire.errors import EngineRefused

pytest.importorskip("trl", reason="TRL is not installed")
aiohttp = pytest.importorskip("aiohttp", reason="aiohttp is not installed")
if importlib.util.find_spec("vllm") is None:
    pytest.skip("TRL's rollouts want vLLM to be installed", allow_module_level=True)

with warnings.catch_warnings():  # TRL warns that the API imported here may change, and about versions of vLLM
    warnings.simplefilter("ignore")
    from deltawire.trainers.trl import DeltaWireTransfer
    from deltawire.trainers.trl_samples import (
        NO_VERSION,
        AsyncRolloutWorker,
        LabelledSample,
        LabellingLoop,
        RecordedTurn,
        RolloutSample,
        _Drawn,
        _labelled,
        label_samples,
    )


pytestmark = pytest.mark.filterwarnings("ignore:TRL currently supports vLLM")


class ServerDouble:
    """A server that answers with the items of `answers` in order. Each item is a status and the labels of tokens."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, list[str]]] = []
        self.asked: list[dict[str, Any]] = []
        self.experts: str | None = None
        double = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                double.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                status, labels = double.answers.pop(0)
                spans = [{"start": place, "end": place + 1, "version": label} for place, label in enumerate(labels)]
                told = {"content": [{"logprob": -0.5 - place} for place in range(len(labels))]}
                one = {"token_ids": [10 + place for place in range(len(labels))], "logprobs": told, "finish_reason": "stop"}
                experts = {} if double.experts is None else {"routed_experts": double.experts}
                data = json.dumps({"choices": [{**one, "weight_versions": spans, **experts}]}).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def server() -> Iterator[ServerDouble]:
    double = ServerDouble()
    yield double
    double.server.shutdown()
    double.server.server_close()


def draw(server: ServerDouble) -> tuple[list[int], list[Any]]:
    """Run one turn of a loop that has only the attributes that a turn needs."""
    loop = object.__new__(LabellingLoop)
    sampling = {"max_tokens": 9, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
    vars(loop).update(sampling, model_name="m", lora_name=None, request_timeout=60, vllm_server_url=server.url, _counters={})

    async def retry(ask: Any, *, label: str, max_attempts: int) -> Any:
        for _ in range(max_attempts):
            try:
                return await ask()
            except aiohttp.ClientError:
                continue
        raise AssertionError

    loop._retry = retry

    async def turn() -> Any:
        async with aiohttp.ClientSession() as loop.session:
            return await loop._generate_one_turn([1, 2, 3])

    return asyncio.run(turn())


def test_tokens_carry_the_version_that_the_server_names(server: ServerDouble) -> None:
    server.answers = [(200, ["4", "4", "7"])]
    tokens, logprobs = draw(server)
    assert tokens == [10, 11, 12]
    assert logprobs == [-0.5, -1.5, -2.5]
    assert [logprob.seq for logprob in logprobs] == [4, 4, 7]
    assert server.asked[0]["token_ids"] == [1, 2, 3]
    assert "min_p" not in server.asked[0]["sampling_params"]


def test_experts_that_the_server_sends_stay_with_the_tokens_of_their_request(server: ServerDouble) -> None:
    server.answers, server.experts = [(200, ["4", "4"])], "sent"
    tokens, logprobs = draw(server)
    ids, mask = np.array([1, 2, 3, *tokens]), np.array([0, 0, 0, 1, 1])
    drawn = RolloutSample([], [], ids, mask, np.zeros(5, np.float32), 0.5, 1, 0, {})
    assert _labelled(drawn, [0.0, 0.0, 0.0, *logprobs]).turns == (RecordedTurn(5, "sent"),)
    assert pickle.loads(pickle.dumps(_labelled(drawn, [0.0, 0.0, 0.0, *logprobs]))).turns == (RecordedTurn(5, "sent"),)
    drawn.input_ids = np.array([1, 2, 9, *tokens])  # TRL changed the prompt
    assert _labelled(drawn, [0.0, 0.0, 0.0, *logprobs]).turns == ()
    server.answers, server.experts = [(200, ["4", "4"])], None
    assert _labelled(drawn, [0.0, 0.0, 0.0, *draw(server)[1]]).turns == ()


def test_tokens_of_weights_of_no_known_version_are_drawn_again(server: ServerDouble) -> None:
    """A restarted server has the initial weights, and calls them "default", until its sidecar has updated it."""
    server.answers = [(200, ["default", "default"]), (200, ["4", "deltawire-quarantined"]), (503, []), (200, ["5", "5"])]
    assert [logprob.seq for logprob in draw(server)[1]] == [5, 5]
    assert len({request["sampling_params"]["seed"] for request in server.asked}) == 1


@pytest.mark.parametrize("status", [403, 404])
def test_a_server_that_does_not_tell_is_refused_with_the_remedy(server: ServerDouble, status: int) -> None:
    server.answers = [(status, [])]
    with pytest.raises(EngineRefused, match="--enable-scale-out"):
        draw(server)


def sample(logprobs: list[float], mask: list[int]) -> RolloutSample:
    ids = np.arange(len(mask))
    return RolloutSample([], [], ids, np.array(mask), np.array(logprobs, np.float32), 0.5, 1, 0, {"reward": 1.0})


def test_versions_go_along_with_tokens_however_trl_puts_turns_together() -> None:
    """Two turns fit together, the prompt of the third changed the last answer, and the fourth starts another row."""
    from trl.experimental.async_grpo.async_rollout_worker import TurnRecord, _chain_to_sequences

    def drawn(*seqs: int) -> list[float]:
        return [_Drawn(-0.1 * seq, seq) for seq in seqs]

    turns = [
        TurnRecord([1, 2], [3, 4], drawn(5, 5)),
        TurnRecord([1, 2, 3, 4, 9], [6, 7, 8], drawn(5, 6, 6)),
        TurnRecord([1, 2, 3, 4, 9, 6, 70], [8], drawn(6)),
        TurnRecord([50, 51], [52, 53], drawn(6, 8)),
    ]
    rows, _ = _chain_to_sequences(turns, "one", 3)
    found = [_labelled(sample(row.old_log_probs, row.completion_mask), row.old_log_probs) for row in rows]
    none = NO_VERSION
    assert [row.input_ids for row in rows] == [[1, 2, 3, 4, 9, 6, 70, 8], [50, 51, 52, 53]]
    assert found[0].made_by.tolist() == [none, none, 5, 5, none, 5, none, 6]
    assert found[1].made_by.tolist() == [none, none, 6, 8]
    assert [one.versions for one in found] == [[5, 6], [6, 8]]
    assert found[1].metrics == {"reward": 1.0, "sample/versions": 2.0}


def test_a_trained_token_without_a_version_is_an_error() -> None:
    from deltawire.errors import EngineError

    with pytest.raises(EngineError, match="which version made a token"):
        _labelled(sample([0.0, -1.0], [0, 1]), [0.0, -1.0])


class Trainer:
    """The attributes of a trainer that `label_samples` uses. Three versions were published since it was resumed at TRL's version 10."""

    def __init__(self) -> None:
        self.model_version = 13
        self.weight_transfer: Any = DeltaWireTransfer("nowhere")
        self.weight_transfer.versions = [version(seq) for seq in (21, 23, 24)]
        self.rollout_worker: Any = AsyncRolloutWorker(dataset=[])
        self.rollout_queue: Any = SimpleNamespace(get=lambda timeout=None: self.samples.pop(0), qsize=lambda: len(self.samples))
        self.samples: list[Any] = []


def version(seq: int) -> Version:
    return Version(**dict.fromkeys(Version.__dataclass_fields__) | {"seq": seq})


def labelled(*seqs: int) -> LabelledSample:
    return _labelled(sample([0.0, *map(float, seqs)], [0, *[1] * len(seqs)]), [0.0, *(_Drawn(-1.0, seq) for seq in seqs)])


def test_trl_gets_the_oldest_version_in_its_own_count() -> None:
    trainer, seen = Trainer(), []
    label_samples(trainer, seen.append)
    assert trainer.rollout_worker._loop_cls is LabellingLoop
    trainer.samples = [labelled(23, 24), labelled(24), labelled(21), labelled(20, 21), labelled(22)]
    assert trainer.rollout_queue.qsize() == 5
    assert [trainer.rollout_queue.get(timeout=1).model_version for _ in range(5)] == [12, 13, 11, 10, 11]
    assert [one.versions for one in seen] == [[23, 24], [24], [21], [20, 21], [22]]


def test_ranks_without_a_worker_have_nothing_to_do() -> None:
    label_samples(SimpleNamespace(rollout_worker=None))


def test_other_transfers_and_other_workers_are_refused() -> None:
    trainer = Trainer()
    trainer.weight_transfer = object()
    with pytest.raises(EngineRefused, match="DeltaWireTransfer"):
        label_samples(trainer)
    trainer = Trainer()
    trainer.rollout_worker = object()
    with pytest.raises(EngineRefused, match="own rollout worker"):
        label_samples(trainer)
