"""Measures what an update costs a vLLM server, on a GPU or a CPU, with models of any size.

    python benchmarks/gpu_engine.py dense-8b --work /dev/shm/work --out results [--seconds 240] [--server-args ARGUMENTS …]

A model of random weights is served, small changes of it are published to a directory, and the sidecar brings them into the server. Each
part of the plan publishes one version:

    idle      nobody uses the server. Shows the memory of the GPU beyond the weights.
    one       one stream of tokens
    load      eight streams
    staging   eight streams, and the update is staged again and again for some seconds. Shows how much staging slows generation.

`:keep` or `:drop` after it says what happens to the KV cache. After the plan, the server goes back over one more update, as in a rollback,
and forwards again. Then the weights are compared with hashes that are worked out
without vLLM; then all weights are overwritten and loaded by vLLM's own full reload, which must give the same memory, bit for bit.

OUT/MODEL.json has everything that was seen. It is written after each part. When `--seconds` are over, the remaining parts are left out.
Trainer, store, sidecar and server share the machine. Tiny models run on vLLM's CPU build too.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import itertools
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

from free_ports import free_port
from gpu_engine_models import MODELS, RECIPE, State, expected_hashes, new_state, save, train
from report import commit

from deltawire import Publisher, WriterOptions
from deltawire.engines import KvCache
from deltawire.engines.vllm.driver.canary import CanaryResult, check_decoding
from deltawire.engines.vllm.driver.sidecar import Sidecar

HERE = Path(__file__).resolve().parent
PLAN = ["idle:keep", "one:keep", "load:keep", "load:drop", "load:keep", "staging:keep"]
_STREAMS = {"idle": 0, "one": 1, "load": 8, "staging": 8}
_TOKENS = 1600
_STAGING_SECONDS = 3.0


class Server:
    """A vLLM server process.

    Parameters
    ----------
    model
        The checkpoint to serve.
    log
        The file for everything that it prints.
    arguments
        More arguments of vLLM.
    """

    def __init__(self, model: Path, log: Path, arguments: list[str]) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", "m"]
        command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "2048", "--max-num-seqs", "32"]
        command += ["--weight-transfer-config", json.dumps({"backend": "deltawire"}), "--worker-extension-cls", "gpu_engine_probe.Probe"]
        command += ["--no-enable-prefix-caching", *arguments]
        paths = [str(HERE), os.environ.get("PYTHONPATH", "")]
        variables = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": os.pathsep.join(paths)}
        self._began = time.monotonic()
        self.boot_seconds = 0.0
        with log.open("wb") as output:
            self._process = subprocess.Popen(command, env={**os.environ, **variables}, stdout=output, stderr=output, start_new_session=True)

    def wait(self, deadline: float) -> None:
        """Return when the server answers. Raise the end of its log if it ends, or takes too long."""
        while True:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server does not start:\n{self._log.read_text(errors='replace')[-9000:]}")
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5):
                self.boot_seconds = time.monotonic() - self._began
                return
            time.sleep(0.2)

    def post(self, route: str, body: Any) -> Any:
        request = urllib.request.Request(f"{self.url}{route}", data=json.dumps(body).encode(), headers={"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=600) as answer:
            return json.load(answer)

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the first worker."""
        return self.post("/collective_rpc", {"method": method, "args": list(arguments)})["results"][0]

    def generate(self) -> list[Any]:
        """Return the tokens and log-probabilities of some completions."""
        found = []
        for prompt in ([5, 6, 7], list(range(3, 60))):
            body = {"model": "m", "prompt": prompt, "max_tokens": 32, "temperature": 0, "ignore_eos": True, "logprobs": 1}
            choice = self.post("/v1/completions", {**body, "return_token_ids": True})["choices"][0]
            found.append([choice["token_ids"], choice["logprobs"]["token_logprobs"]])
        return found

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class Load:
    """Streams of tokens, in a process of their own (gpu_engine_clients.py)."""

    def __init__(self, url: str, clients: int) -> None:
        command = [sys.executable, str(HERE / "gpu_engine_clients.py"), url, str(clients), str(_TOKENS)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._stamps: list[list[float | None]] = []
        assert self._process.stdout is not None
        self._process.stdout.readline()

    def stop(self) -> dict[str, Any]:
        """End the streams. Returns the numbers of requests, and errors."""
        told = json.loads(self._process.communicate()[0])
        self._stamps = told.pop("stamps")
        return dict(told)

    def rate(self, since: float, until: float) -> float:
        """Return the tokens per second of all streams."""
        count = sum(at is not None and since <= at < until for stamps in self._stamps for at in stamps)
        return count / max(1e-9, until - since)

    def gaps(self, since: float, until: float) -> list[float]:
        """Return the milliseconds between tokens of the same request, if a part of them is in this window."""
        found = []
        for stamps in self._stamps:
            pairs = itertools.pairwise(stamps)
            found += [(b - a) * 1e3 for a, b in pairs if a is not None and b is not None and b >= since and a <= until]
        return found


class Measurement:
    """The measurement of one model.

    Parameters
    ----------
    name
        A key of `MODELS`.
    options
        The options of the command line.
    """

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self._config = MODELS[name]
        self._options = options
        self._work = options.work / name
        self._file = options.out / f"{name}.json"
        self._deadline = time.monotonic() + options.seconds
        self._calls: list[tuple[str, float, float]] = []
        self._events: list[dict[str, Any]] = []
        self._usual: CanaryResult | None = None
        """How much decoding and prompts differ before the first update."""
        self.told: dict[str, Any] = {
            "model": name,
            "commit": commit(),
            "arguments": options.server_args,
            "density": options.density,
            "times": {},
            "updates": [],
        }

    def run(self) -> None:
        """Measure everything. The server is ended, and the file is written, whatever happens."""
        shutil.rmtree(self._work, ignore_errors=True)
        self._work.mkdir(parents=True)
        try:
            with contextlib.ExitStack() as opened:
                self._measure(opened)
        except BaseException as error:
            self.told["error"] = repr(error)[:10000]
            raise
        finally:
            self._write()
            shutil.rmtree(self._work, ignore_errors=True)

    def _measure(self, opened: contextlib.ExitStack) -> None:
        told, options = self.told, self._options
        with self._clock("make"):
            state = new_state(self._config)
        told |= {"parameters": sum(each.size for each in state.values()), "tensors": len(state)}
        told["bytes"] = sum(each.nbytes for each in state.values())
        with self._clock("save"):
            start = save(self._work / "start", self._config, state)
        server = Server(start, options.out / f"{told['model']}-server.log", options.server_args)
        opened.callback(server.kill)
        attachments = {path.name: path.read_bytes() for path in start.iterdir() if path.suffix == ".json" and "index" not in path.name}
        store = str(self._work / "store")
        publisher = opened.enter_context(Publisher(store, attachments=attachments, options=WriterOptions(skips=False)))
        with self._clock("first_publish"):
            publisher.publish(state)
        server.wait(self._deadline)
        told["boot_s"] = server.boot_seconds
        for path in start.glob("*.safetensors"):
            path.unlink()  # it may be in memory
        size = f"{told['parameters'] / 1e9:.2f} B weights, {told['bytes'] / 1e9:.2f} GB, {len(state)} tensors"
        self._say(f"{size}; {_rounded(told['times'])}, boot {server.boot_seconds:.1f} s")
        server.call("probe_watch")
        first = server.generate()
        sidecar = self._sidecar(server)
        opened.callback(sidecar.close)
        self._first_step(server, sidecar)
        told["same_after_first"] = server.generate() == first
        usual = check_decoding(sidecar.routes, most_difference=math.inf, most_mean=math.inf)
        self._usual, told["canary_usual"] = usual, [usual.largest, usual.mean]
        for number, step in enumerate(options.plan):
            if self._left() < 35:
                self._say(f"{step} is left out: {self._left():.0f} s are left")
                continue
            with self._clock("train"):
                train(state, options.density, 100 + number)
            told["updates"].append(self._update(step, publisher, sidecar, server, state))
            self._write()
        told["generation_changed"] = server.generate() != first
        if self._left() > 60:
            self._go_back(publisher, sidecar, server, state)
        if RECIPE not in self._config:  # kernels repack quantised weights; the reload compares them
            self._compare(server, state)
        if self._left() > 25:
            self._reload(server, state)

    def _first_step(self, server: Server, sidecar: Sidecar) -> None:
        """Let the sidecar recognise the version that the server was started with. The workers learn their layout."""
        before = server.call("probe_use", True)
        began = time.monotonic()
        sidecar.step()
        seconds, after = time.monotonic() - began, server.call("probe_use")
        (status,) = sidecar.routes.status()
        self.told["first"] = {
            "step_s": seconds,
            "status": status,
            "calls": list(self._calls),
            "spans": server.call("probe_spans"),
            "kinds": server.call("probe_kinds"),
            **_extra_memory(before, after),
        }
        more = self.told["first"].get("peak_mib")
        self._say(f"first step {seconds:.2f} s, live {status['live']}, {status['tensors']}, why not {status['why_not']}, peak {more} MiB")
        self._write()

    def _update(self, step: str, publisher: Publisher, sidecar: Sidecar, server: Server, state: State) -> dict[str, Any]:
        """Publish a version, and have it served. Returns what that took."""
        kind, _, kv_cache = step.partition(":")
        _set_kv_cache(sidecar, KvCache(kv_cache or "drop"))
        staged = [update["worker_stage_ms"] for update in self.told["updates"] if update["worker_stage_ms"]]
        times = math.ceil(_STAGING_SECONDS * 1e3 / max(1.0, min(staged, default=1e3))) if kind == "staging" else 1
        server.call("probe_stage_times", times)
        load = Load(server.url, _STREAMS[kind]) if _STREAMS[kind] else None
        before = server.call("probe_use", True)
        quiet = time.monotonic() + 0.3
        if load:
            time.sleep(0.3 + self._options.quiet)
        server.call("probe_spans")
        self._calls.clear()
        self._events.clear()
        stored, began = _size(self._work / "store"), time.monotonic()
        version = publisher.publish(state)
        published, own = time.monotonic(), time.process_time()
        sidecar.step()
        own, after = time.process_time() - own, server.call("probe_use")
        calls, spans, (status,) = list(self._calls), server.call("probe_spans"), sidecar.routes.status()
        prepared = next((at for what, at, _ in calls if "deltawire_prepare" in what), published)
        swaps = [(at, at + ms / 1e3) for what, at, ms in calls if "deltawire_swap" in what]
        start, end = (swaps[0][0], swaps[-1][1]) if swaps else (prepared, time.monotonic())
        stages = [(at, at + ms / 1e3) for name, at, ms in spans if name == "LiveWeights.stage"]
        last, swap = status["last"], status.get("last_swap") or {}
        found: dict[str, Any] = {
            "step": step,
            "seq": version.seq,
            "delta_bytes": _size(self._work / "store") - stored,
            "publish_s": published - began,
            "commit_to_serving_ms": (end - published) * 1e3,
            "fetch_ms": (prepared - published) * 1e3,
            "staging_ms": (start - prepared) * 1e3,
            "worker_stage_ms": statistics.median((b - a) * 1e3 for a, b in stages) if stages else None,
            "worker_stages": len(stages),
            "swap_call_ms": (end - start) * 1e3,
            "swap_calls": len(swaps),
            "drain_ms": swap.get("drain_ms"),
            "core_swap_ms": swap.get("swap_ms"),
            "preempted": swap.get("preempted"),
            "worker": last,
            "live": status.get("live"),
            "staged_bytes": status.get("staged_bytes"),
            "server_cpu_s": after["cpu_s"] - before["cpu_s"],
            "sidecar_cpu_s": own,
            "calls": calls,
            "spans": spans,
            "events": list(self._events),
            **_extra_memory(before, after),
        }
        if load:
            time.sleep(self._options.quiet / 2)
            now = time.monotonic()
            found["requests"] = load.stop()
            usual = load.gaps(quiet, began)
            base = load.rate(quiet, began)
            found |= {
                "gap_ms": max(load.gaps(start, end), default=None),
                "gap_staging_ms": max(load.gaps(stages[0][0], start), default=None) if stages else None,
                "gap_publishing_ms": max(load.gaps(began, published), default=None),
                "gap_usual_ms": [statistics.median(usual), max(usual)] if usual else None,
                "rates": {
                    "before": base,
                    "publishing": load.rate(began, published),
                    "fetching": load.rate(published, prepared),
                    "staging": load.rate(stages[0][0], stages[-1][1]) if stages else None,
                    "after": load.rate(end, now),
                },
            }
            if kind == "staging" and stages:
                usually = (base + found["rates"]["after"]) / 2
                share = 1 - found["rates"]["staging"] / max(1e-9, usually)
                window = stages[-1][1] - stages[0][0]
                found["slower_while_staging"] = share
                found["generation_lost_ms"] = share * window * 1e3 / len(stages)
        elif kind == "idle":
            try:
                result = check_decoding(sidecar.routes, usual=self._usual)
                found["canary"] = [result.largest, result.mean]
            except Exception as error:
                found["canary"] = repr(error)
        self._tell(found)
        return found

    def _tell(self, found: dict[str, Any]) -> None:
        shown = ["delta_bytes", "publish_s", "commit_to_serving_ms", "fetch_ms", "staging_ms", "worker_stage_ms", "worker_stages"]
        shown += ["swap_call_ms", "drain_ms", "core_swap_ms", "preempted", "peak_mib", "left_mib", "gap_ms", "gap_staging_ms"]
        shown += ["server_cpu_s", "sidecar_cpu_s", "slower_while_staging", "generation_lost_ms"]
        self._say(f"{found['step']}: {_rounded({name: found.get(name) for name in shown})}")
        more = {name: found[name] for name in ("gap_usual_ms", "rates", "requests", "canary") if name in found}
        self._say(f"    worker {_rounded(found['worker'])}; {more}")
        sums: dict[str, list[float]] = {}
        for name, _, ms in found["spans"]:
            sums.setdefault(name, []).append(ms)
        self._say("    " + ", ".join(f"{name} {len(each)} × {sum(each) / len(each):.2f} ms" for name, each in sums.items()))

    def _go_back(self, publisher: Publisher, sidecar: Sidecar, server: Server, state: State) -> None:
        """Let the workers keep an update, publish one, and go back over it while eight streams generate. Compare all memory."""
        sidecar.close()
        train(state, self._options.density, 99)
        with contextlib.closing(self._sidecar(server, undo_bytes=1 << 30)) as keeping:
            keeping.step()
            memory, served = server.call("probe_memory"), keeping.served
            publisher.publish(state)
            keeping.step()
            assert served is not None
            after = keeping.served
            (kept,) = keeping.routes.status()
            load = Load(server.url, _STREAMS["load"])
            time.sleep(1.0)
            server.call("probe_use", True)
            began = time.monotonic()
            answer = keeping.routes.swap(served.seq, str(served.seq), KvCache.KEEP)
            ended = time.monotonic()
            use, (status,) = server.call("probe_use"), keeping.routes.status()
            time.sleep(0.5)
            requests = load.stop()
            self.told["back"] = {
                "kept": kept.get("undo"),
                "kept_bytes": kept.get("undo_bytes"),
                "outcome": answer.outcome,
                "error": answer.error,
                "call_ms": (ended - began) * 1e3,
                "drain_ms": answer.drain_ms,
                "swap_ms": answer.swap_ms,
                "worker": status["last"],
                "seq": [None if after is None else after.seq, status["seq"], served.seq],
                "gap_ms": max(load.gaps(began, ended), default=None),
                "requests": requests,
                "use": use,
                "same_memory": server.call("probe_memory") == memory,
            }
            keeping.step()  # forwards again
        self._say(f"back: {self.told['back']}")
        self._write()

    def _compare(self, server: Server, state: State) -> None:
        """Compare the parameters in the server with those that the weights should give."""
        with self._clock("compare"):
            held, expected = server.call("probe_hashes"), expected_hashes(state)
        both = held.keys() & expected.keys()
        self.told["by_hand"] = {
            "compared": len(both),
            "different": sorted(name for name in both if held[name] != expected[name])[:20],
            "not_compared": sorted(held.keys() ^ expected.keys())[:20],
        }
        self._say(f"compared with hashes that were worked out by hand: {self.told['by_hand']}")
        self._write()

    def _reload(self, server: Server, state: State) -> None:
        """Overwrite all weights, let vLLM load everything by itself, and compare all memory of the model."""
        with self._clock("save_last"):
            last = save(self._work / "last", self._config, state)
        tokens, memory = server.generate(), server.call("probe_memory")
        server.post("/pause?mode=keep", None)
        wiped = server.call("probe_wipe")
        reloads = [server.call("probe_reload", str(last)) for _ in range(2)]
        server.post("/resume", None)
        loaded = server.call("probe_memory")
        self.told["reload"] = {
            "wiped_bytes": wiped,
            "reloads": reloads,
            "compared": len(memory),
            "different": sorted(path for path in memory.keys() | loaded.keys() if memory.get(path) != loaded.get(path))[:20],
            "same_tokens": server.generate() == tokens,
        }
        self._say(f"vLLM's own reload: {self.told['reload']}")
        self._write()

    def _sidecar(self, server: Server, **more: Any) -> Sidecar:
        parameters = inspect.signature(Sidecar.__init__).parameters
        places: dict[str, Any] = {"spool": self._work / "spool", **more}
        if "mirror" in parameters:
            places["mirror"] = None
        sidecar = Sidecar(server.url, str(self._work / "store"), on_event=lambda event: self._events.append(event.to_json()), **places)
        ask = sidecar.routes._ask

        def watched(method: str, route: str, body: Any, *rest: Any, **named: Any) -> Any:
            began = time.monotonic()
            try:
                return ask(method, route, body, *rest, **named)
            finally:
                what = f" {body['method']}" if isinstance(body, dict) and "method" in body else ""
                self._calls.append((route.partition("?")[0] + what, began, (time.monotonic() - began) * 1e3))

        sidecar.routes._ask = watched  # type: ignore[method-assign]
        return sidecar

    def _left(self) -> float:
        return self._deadline - time.monotonic()

    @contextlib.contextmanager
    def _clock(self, what: str) -> Any:
        began = time.monotonic()
        yield
        self.told["times"][what] = time.monotonic() - began

    def _say(self, text: str) -> None:
        print(f"{self._options.seconds - self._left():5.0f} s {self.told['model']}: {text}", flush=True)

    def _write(self) -> None:
        self._file.write_text(json.dumps(self.told, default=str))


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _set_kv_cache(sidecar: Sidecar, kv_cache: KvCache) -> None:
    """Use another policy from now on."""
    sidecar._replica.controller._kv_cache = kv_cache


def _extra_memory(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Return the memory of the GPU, in MiB, that was allocated at most in between, and that still is."""
    if "allocated" not in before:
        return {}
    mib = 2**20
    return {
        "peak_mib": (after["peak_allocated"] - before["allocated"]) / mib,
        "left_mib": (after["allocated"] - before["allocated"]) / mib,
        "reserved_mib": (after["peak_reserved"] - before["reserved"]) / mib,
    }


def _rounded(values: dict[str, Any]) -> dict[str, Any]:
    return {name: round(value, 3 if abs(value) < 1 else 1) for name, value in values.items() if isinstance(value, int | float)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", choices=sorted(MODELS))
    parser.add_argument("--work", type=Path, required=True, help="a directory for the store and for checkpoints; its contents are deleted")
    parser.add_argument("--out", type=Path, required=True, help="the directory for results")
    parser.add_argument("--plan", nargs="*", default=PLAN, help="idle, one, load or staging, each with :keep or :drop")
    parser.add_argument("--density", type=float, default=0.01, help="the share of weights that each version changes")
    parser.add_argument("--seconds", type=float, default=600, help="the time for each model")
    parser.add_argument("--quiet", type=float, default=2.0, help="seconds of generation before an update")
    parser.add_argument("--server-args", nargs=argparse.REMAINDER, default=[], help="more arguments of vLLM; they come last")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(124))  # so that the results are written, and servers are ended
    failed = False
    for name in options.models:
        limit = threading.Timer(options.seconds + 15, os.kill, (os.getpid(), signal.SIGTERM))
        limit.daemon = True
        limit.start()
        try:
            Measurement(name, options).run()
        except Exception as error:
            failed = True
            print(f"{name} failed: {error!r}"[:6000].replace("\\n", "\n"), flush=True)
        finally:
            limit.cancel()
    sys.exit(failed)


if __name__ == "__main__":
    main()
