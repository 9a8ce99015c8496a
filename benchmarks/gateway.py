"""Measure what the gateway adds to an engine: requests per second, latency, memory over time, and what SIGKILL loses.

The floor is the bare engine with the same client. One engine is a trivial ASGI server that answers at once and keeps what it "drew", so
everything that is measured is the gateway's. The other is `deltawire serve` with a tiny model. All are separate processes of this machine.

    python benchmarks/gateway.py --seconds 10               the time of each load
    python benchmarks/gateway.py --minutes 60               one long load instead, with the gateway's memory over time
    python benchmarks/gateway.py --minutes 60 --rate 300    the same at 300 requests per second, evenly paced

Both write their results to benchmarks/results/ and into docs/benchmarks.md, unless --no-keep is given.
"""

from __future__ import annotations

import argparse
import array
import asyncio
import contextlib
import json
import math
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, MutableSequence, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from report import Table, keep, show

from deltawire import Publisher
from deltawire.engines.answer_table import ANSWERS_ROUTE, ENGINE_ROUTE, RECORD_HEADER, REQUEST_ID, AnswerTable
from deltawire.format.interactions import Interactions
from deltawire.gateway import GatewayOptions, serve_gateway
from deltawire.gateway.http.bodies import headers_of, send_bytes, send_json, send_start
from deltawire.gateway.http.http_server import listen
from deltawire.gateway.options import EngineAddress
from deltawire.store import open_store
from deltawire.store.live_keys import INTERACTIONS

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes of servers: more threads only wait for each other
_TOKENS = 32
_CLIENTS = 16
"""The clients of a long load."""
_INTERVALS = 12
"""A long load is divided into this many parts, and memory is measured after each."""
_WORDS = 64
_BODY = {"model": "policy", "messages": [{"role": "user", "content": "w1 w2 w3 w4"}], "max_tokens": _TOKENS}


class _InstantEngine:
    """Answers every chat with the same 32 tokens, at once."""

    def __init__(self, label: str) -> None:
        self._table = AnswerTable()
        self._label = label
        self._spans = [{"version": label, "start": 0, "end": _TOKENS}]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"]
        if path == ENGINE_ROUTE:
            await send_json(send, {"label": self._label, "running": True, "logprobs": "processed_logprobs"})
            return
        if path.startswith(ANSWERS_ROUTE):
            found = self._table.reply(path, scope.get("query_string", b""))
            await send_bytes(send, found or b"{}", "application/json", status=200 if found else 404)
            return
        headers = headers_of(scope)
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        name = headers.get(REQUEST_ID, "none")
        if RECORD_HEADER in headers:
            choice = {"index": 0, "token_ids": list(range(_TOKENS)), "logprobs": {"token_logprobs": [-0.5] * _TOKENS}}
            choice |= {"finish_reason": "stop", "weight_versions": self._spans}
            self._table.put(name, [{"prompt_token_ids": [1, 2, 3, 4], "choices": [choice]}], logprobs="processed_logprobs")
        own = {"id": f"chatcmpl-{name}", "created": 1, "model": "policy"}
        if b'"stream"' in body:
            await send_start(send, 200, {"content-type": "text/event-stream"})
            for number in range(_TOKENS):
                event = {**own, "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": f"w{number} "}}]}
                data = b"data: " + json.dumps(event).encode() + b"\n\n"
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})
            return
        message = {"role": "assistant", "content": "word " * _TOKENS}
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
        await send_json(send, {**own, "object": "chat.completion", "choices": choices})


def _instant(label: str, ready: Any) -> None:
    asyncio.run(listen(_InstantEngine(label), "127.0.0.1", 0, threading.Event(), ready.send))


def _transformers(url: str, ready: Any) -> None:
    from deltawire.rl.serving.openai_server import serve_openai

    serve_openai(url, on_ready=ready.send)


def _gateway(url: str, journal: str, engine: str, ready: Any) -> None:
    options = GatewayOptions([EngineAddress(engine)], journal=Path(journal))
    serve_gateway(url, options, on_ready=ready.send)


@contextlib.contextmanager
def _process(run: Callable[..., None], *arguments: Any) -> Iterator[tuple[Any, str]]:
    """Run a server as a process, and yield it with its address."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=run, args=(*arguments, there), daemon=True)
    process.start()
    try:
        yield process, here.recv()
    finally:
        process.kill()
        process.join()


class _Pace:
    """Tells the clients of one load together when to send: at once, or evenly paced."""

    def __init__(self, rate: float | None, seconds: float) -> None:
        self._rate = rate
        self._given = 0
        self._start = time.perf_counter()
        self._end = self._start + seconds

    async def wait(self) -> float | None:
        """Wait until the next request is due, and return when that is. None says that the load has ended."""
        if self._rate is None:
            now = time.perf_counter()
            return now if now <= self._end else None
        due = self._start + self._given / self._rate
        self._given += 1
        if max(due, time.perf_counter()) > self._end:
            return None
        await asyncio.sleep(due - time.perf_counter())
        return due


class _Client:
    """A plain HTTP client over one connection, so that the client itself costs little."""

    def __init__(self, url: str, *, stream: bool) -> None:
        host, _, port = url.removeprefix("http://").rpartition(":")
        self._host, self._port = host, int(port)
        data = json.dumps({**_BODY, "stream": True} if stream else _BODY).encode()
        self._request = b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        self._request += b"content-length: %d\r\n\r\n" % len(data) + data

    async def run(self, pace: _Pace, times: MutableSequence[float], ids: list[str] | None = None) -> None:
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            while (start := await pace.wait()) is not None:
                writer.write(self._request)
                head = await reader.readuntil(b"\r\n\r\n")
                if not head.startswith(b"HTTP/1.1 200"):
                    raise RuntimeError(f"the server refused a request: {head[:200]!r}")
                headers = {line.partition(b":")[0].lower(): line.partition(b":")[2].strip() for line in head.split(b"\r\n")[1:]}
                if b"content-length" in headers:
                    await reader.readexactly(int(headers[b"content-length"]))
                else:
                    while size := int((await reader.readuntil(b"\r\n")).strip(), 16):
                        await reader.readexactly(size + 2)
                    await reader.readexactly(2)
                times.append(time.perf_counter() - start)
                if ids is not None:
                    ids.append(headers[b"x-deltawire-inference-id"].decode())
        finally:
            writer.close()


def _load(
    url: str, clients: int, seconds: float, *, rate: float | None = None, stream: bool = False, ids: list[str] | None = None
) -> tuple[float, Sequence[float]]:
    """Return requests per second, and the seconds of each request from when it was due."""
    times = array.array("d")

    async def run() -> float:
        start, pace = time.perf_counter(), _Pace(rate, seconds)
        await asyncio.gather(*(_Client(url, stream=stream).run(pace, times, ids) for _ in range(clients)))
        return time.perf_counter() - start

    took = asyncio.run(run())
    return len(times) / took, times


def _warm_load(
    url: str, clients: int, seconds: float, *, stream: bool = False, ids: list[str] | None = None
) -> tuple[float, Sequence[float]]:
    """Return what `_load` returns, after a tenth of the load that is not counted."""
    _load(url, clients, seconds / 10, stream=stream, ids=ids)
    return _load(url, clients, seconds, stream=stream, ids=ids)


def _publish(url: Path) -> str:
    """Publish a tiny model with a tokenizer, so that `deltawire serve` can serve it. Returns the label of its weights."""
    import tokenizers
    import torch
    import transformers

    from deltawire.trainers import WeightSource

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.Qwen3Config(**sizes, head_dim=16, vocab_size=_WORDS, max_position_embeddings=256, eos_token_id=None)
    model = transformers.Qwen3ForCausalLM(config).bfloat16().eval()
    words = {"<unk>": 0, **{f"w{number}": number for number in range(1, _WORDS)}}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    with tempfile.TemporaryDirectory() as files:
        tokenizer.save_pretrained(files)
        config.save_pretrained(files)
        with Publisher(url, attachments=files) as publisher:
            return str(WeightSource(model).publish(publisher, step=0).seq)


def _memory(process: Any) -> float:
    """Return the resident memory of a process in MiB."""
    for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return float("nan")


def _processor_seconds(process: Any) -> float:
    """Return the processor time that a process has used."""
    words = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def _stored(store: Path) -> list[str]:
    with open_store(store) as opened:
        files = [Interactions.parse(opened.get(info.key, limit=1 << 26)) for info in opened.list(INTERACTIONS)]
    return [one.id for file in files for one in file.interactions]


def _ms(seconds: Sequence[float], part: float) -> float:
    return 1e3 * float(np.quantile(seconds, part))


def measure(seconds: float = 10.0) -> Table:
    """Compare each engine with and without the gateway in front of it, recording on.

    Parameters
    ----------
    seconds
        The time of each load.
    """
    table = Table(
        "gateway",
        f"The gateway with recording on, against the bare engine: chats with answers of {_TOKENS} tokens, {seconds:g} s for each load",
        ["engine", "clients", "streamed", "bare requests/s", "gateway requests/s", "share", "added p50 ms", "added p99 ms", "processor ms"],
    )
    loads = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder, "store")
        label = _publish(store)
        with _process(_instant, label) as (_, engine), _process(_gateway, str(store), f"{folder}/a", engine) as (process, url):
            _wait_for_engine(url)
            for clients, stream in ((1, False), (1, True), (16, False), (16, True)):
                _compare(table, "instant", engine, process, url, clients, stream, seconds)
            loads.append(os.getloadavg()[0])
        with _process(_transformers, str(store)) as (_, engine), _process(_gateway, str(store), f"{folder}/b", engine) as (process, url):
            _wait_for_engine(url)
            for clients in (1, 16):
                _compare(table, "deltawire serve, tiny model", engine, process, url, clients, False, seconds)
        loads.append(os.getloadavg()[0])
        _kill(table, store, folder, label)
    table.notes.append(_load_words(loads))
    return table


def measure_long(minutes: float = 60.0, rate: float | None = None) -> Table:
    """Load one gateway with 16 clients for a long time, and tell its memory at intervals.

    Parameters
    ----------
    minutes
        The time of the load.
    rate
        The requests per second of all clients together. By default each client sends its next request as soon as it has the answer.
    """
    asked = f"{_CLIENTS} clients" if rate is None else f"{rate:g} requests/s of {_CLIENTS} clients"
    table = Table(
        "gateway-memory",
        f"One gateway under {asked} for {minutes:g} minutes, with the instant engine and recording on",
        ["after", "answers", "requests/s", "p50 ms", "p99 ms", "memory of the gateway", "journal"],
    )
    loads, memory, answers = [os.getloadavg()[0]], [], 0
    with tempfile.TemporaryDirectory() as folder:
        store, journal = Path(folder, "store"), Path(folder, "journal")
        label = _publish(store)
        with _process(_instant, label) as (_, engine), _process(_gateway, str(store), str(journal), engine) as (process, url):
            _wait_for_engine(url)
            table.rows.append(["0 min", "0", "", "", "", f"{_memory(process):.0f} MiB", ""])
            for number in range(1, _INTERVALS + 1):
                reached, times = _load(url, _CLIENTS, minutes * 60 / _INTERVALS, rate=rate)
                answers += len(times)
                loads.append(os.getloadavg()[0])
                memory.append(_memory(process))
                speed = [f"{reached:,.0f}", f"{_ms(times, 0.5):.1f}", f"{_ms(times, 0.99):.1f}"]
                after = f"{minutes * number / _INTERVALS:.3g} min"
                table.rows.append([after, f"{answers:,}", *speed, f"{memory[-1]:.0f} MiB", f"{_size(journal) / 1024:,.0f} KiB"])
            end, last = time.perf_counter() + 60, -1
            # One count can take longer than a minute, and does not see files that come meanwhile. So the last two must be equal.
            while (stored := _count(store)) < answers and (stored != last or time.perf_counter() < end):
                last = stored
                time.sleep(1)
    table.check(f"every one of the {answers:,} acknowledged answers is in the store, and nothing else ({stored:,})", stored == answers)
    half = memory[_INTERVALS // 2 - 1]
    table.check(f"memory grows by less than 10% in the second half ({half:.0f} to {memory[-1]:.0f} MiB)", memory[-1] < 1.1 * half)
    table.notes.append(
        "The gateway remembers the ids of the newest 200,000 answers for feedback, about 300 bytes each, so memory grows first."
    )
    if rate is not None:
        table.notes.append("The time of a request counts from when it was due, so it includes waiting for a client that is free.")
    table.notes.append(_load_words(loads))
    return table


def _compare(table: Table, name: str, engine: str, process: Any, url: str, clients: int, stream: bool, seconds: float) -> None:
    bare, bare_times = _warm_load(engine, clients, seconds, stream=stream)
    ids: list[str] = []
    before = _processor_seconds(process)
    rate, times = _warm_load(url, clients, seconds, stream=stream, ids=ids)
    spent = _processor_seconds(process) - before
    added = [_ms(times, part) - _ms(bare_times, part) for part in (0.5, 0.99)]
    row = [name, str(clients), "yes" if stream else "no", f"{bare:,.0f}", f"{rate:,.0f}", f"{rate / bare:.0%}"]
    table.rows.append([*row, *(f"{each:.2f}" for each in added), f"{1e3 * spent / len(ids):.2f}"])


def _wait_for_engine(url: str) -> None:
    import urllib.error
    import urllib.request

    for _ in range(6000):
        with contextlib.suppress(urllib.error.URLError), urllib.request.urlopen(f"{url}/healthz"):
            return
        time.sleep(0.01)
    raise RuntimeError("the engine did not start")


def _load_words(loads: list[float]) -> str:
    return (
        f"While this was measured, the load average of one minute was {min(loads):.1f} to {max(loads):.1f} on {os.cpu_count()} processors. "
        "It counts all processes that run or could run, those of this benchmark too."
    )


def _size(folder: Path) -> int:
    """Return the bytes of the files in a folder. Files that vanish meanwhile do not count."""
    total = 0
    for path in folder.rglob("*.*"):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size if path.is_file() else 0
    return total


def _count(store: Path) -> int:
    """Return how many interactions are in the store. They are read one file after the other, so this takes little memory."""
    with open_store(store) as opened:
        return sum(len(Interactions.parse(opened.get(info.key, limit=1 << 26)).interactions) for info in opened.list(INTERACTIONS))


def _kill(table: Table, store: Path, folder: str, label: str) -> None:
    """Kill a gateway under load, start another, and tell how long it took until the store had every acknowledged answer, once."""
    ids: list[str] = []
    with _process(_instant, label) as (_, engine):
        with _process(_gateway, str(store), f"{folder}/c", engine) as (process, url):
            _wait_for_engine(url)

            async def load() -> None:
                forever = _Pace(None, math.inf)
                timer = asyncio.get_running_loop().call_later(2.0, os.kill, process.pid, signal.SIGKILL)
                with contextlib.suppress(OSError, EOFError):  # the gateway dies in the middle
                    await asyncio.gather(*(_Client(url, stream=False).run(forever, array.array("d"), ids) for _ in range(16)))
                timer.cancel()

            asyncio.run(load())
        left = _size(Path(folder, "c"))
        start = time.perf_counter()
        with _process(_gateway, str(store), f"{folder}/c", engine):
            for _ in range(1200):
                if set(ids) <= set(_stored(store)):
                    break
                time.sleep(0.05)
            took = time.perf_counter() - start
    found = _stored(store)
    lost, twice = len(set(ids) - set(found)), len(found) - len(set(found))
    table.check(f"of {len(ids):,} acknowledged answers, SIGKILL under load loses none ({lost})", lost == 0)
    table.check(f"none is stored twice ({twice})", twice == 0)
    table.notes.append(
        f"After the SIGKILL, {left / 1024:,.0f} KiB were in the journal. A new gateway had everything in the store {took:.1f} s after its "
        "start, which includes starting Python."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="the time of each load")
    parser.add_argument("--minutes", type=float, help="measure memory under one load of this time instead")
    parser.add_argument("--rate", type=float, help="with --minutes: requests per second of all clients together, evenly paced")
    parser.add_argument("--no-keep", action="store_true", help="write no results")
    arguments = parser.parse_args()
    if arguments.rate is not None and (arguments.minutes is None or not arguments.rate > 0):
        parser.error("--rate is a number above 0, and needs --minutes")
    table = measure(arguments.seconds) if arguments.minutes is None else measure_long(arguments.minutes, arguments.rate)
    show(table)
    if not arguments.no_keep:
        keep(table)


if __name__ == "__main__":
    main()
