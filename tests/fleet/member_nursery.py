"""Start member processes in milliseconds. A process that has imported torch and transformers forks them, and they run the real command.
It is itself forked from the parent with these imports (`tests/forked_python.py`).

    with MemberNursery(folder) as nursery:
        member = nursery.start("a", "--from", url, "--env", "rewards_for_tests:length")
        member.signal(signal.SIGKILL)

Run as a script, this file is the nursery process. Only this process reaps the members, so a member's id stays valid until the test
has asked how it ended. When the test process ends for any reason, the members end too.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from forked_python import ForkedPopen

HERE = Path(__file__).resolve().parent
PATIENCE = 120.0


def wait_until(condition: Callable[[], object], what: Callable[[], str] | str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"the wait timed out: {what if isinstance(what, str) else what()}"
        time.sleep(0.05)


class LiveMember:
    """One member process, and its events so far."""

    def __init__(self, nursery: MemberNursery, pid: int, log: Path) -> None:
        self.pid = pid
        self._nursery = nursery
        self._log = log

    def events(self, name: str) -> list[dict[str, Any]]:
        found = []
        for line in self._log.read_text().splitlines():
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                if event.get("event") == name:
                    found.append(event)
        return found

    def wait_for(self, name: str, count: int = 1) -> list[dict[str, Any]]:
        """Wait until there are this many events of a name, and return them."""
        wait_until(lambda: len(self.events(name)) >= count, lambda: f"{name}; it said:\n{self.log()}")
        return self.events(name)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def ended(self) -> int:
        """Wait until the member has ended, and return its exit status."""
        answer = self._nursery.ask("wait", self.pid)
        assert isinstance(answer, int)
        return answer

    def log(self) -> str:
        return self._log.read_text()[-6000:]


class MemberNursery:
    """The test's connection to the nursery process."""

    def __init__(self, folder: Path, environment: Mapping[str, str] | None = None) -> None:
        path = os.pathsep.join(filter(None, [str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH")]))
        self._folder = folder
        self._count = 0
        self._process = ForkedPopen(
            "torch",
            [__file__],
            env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, name: str, *arguments: str, how: str = "command", environment: Mapping[str, str] | None = None) -> LiveMember:
        """Start a member of this name. `how` names one of the functions at the end of this file."""
        self._count += 1
        log = self._folder / f"member-{name}-{self._count}.log"
        log.touch()
        command = ["member", "--name", name, "--poll", "0.05", "--json", *arguments]
        pid = self.ask("start", how, command, str(log), dict(environment or {}))
        assert isinstance(pid, int)
        return LiveMember(self, pid, log)

    def ask(self, *command: object) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the nursery has ended"
        return json.loads(answer)

    def __enter__(self) -> MemberNursery:
        return self

    def __exit__(self, *_: object) -> None:
        with self._process:  # closes the nursery's input, so that the nursery kills its children and ends
            pass


# The work of children


def command(arguments: list[str]) -> None:
    """Run `deltawire member` unchanged."""
    from deltawire.cli import main

    sys.argv = ["deltawire", *arguments]
    main()


def until_the_pipe_closes(arguments: list[str]) -> None:
    """Run the command as a fleet does, with the pipe that the environment names as its standard input."""
    os.dup2(os.open(os.environ["DELTAWIRE_TEST_PIPE"], os.O_RDONLY), 0)
    command([*arguments, "--leave-with-stdin"])


def an_hour_late(arguments: list[str]) -> None:
    _serve(arguments, clock=lambda: time.time() - 3600)


def an_hour_early(arguments: list[str]) -> None:
    _serve(arguments, clock=lambda: time.time() + 3600)


def everything_twice(arguments: list[str]) -> None:
    """Upload every result twice: first a copy with different content, then the result."""
    from dataclasses import replace

    from blake3 import blake3

    from deltawire.format.rollouts import Rollouts
    from deltawire.store import fleet_keys
    from deltawire.store.local import LocalStore

    put = LocalStore.put

    def put_twice(self: Any, key: str, data: Any, **options: Any) -> None:
        result = fleet_keys.parse_rollout_key(key)
        if result is not None:
            twin = replace(Rollouts.parse(bytes(data)), seconds={"twin": 1.0}).to_bytes()
            put(self, fleet_keys.rollout_key(result._replace(blake3=blake3(twin).hexdigest())), twin)
        put(self, key, data, **options)

    LocalStore.put = put_twice  # type: ignore[method-assign]
    command(arguments)


def _serve(arguments: list[str], clock: Callable[[], float]) -> None:
    from deltawire.rl.member import MemberOptions, serve

    arguments = [each for each in arguments if each != "--json"]
    given = dict(zip(arguments[1::2], arguments[2::2], strict=True))
    options = MemberOptions(given["--from"], "transformers", (given["--env"],), given["--name"], poll=float(given["--poll"]))
    serve(options, stop=threading.Event(), on_event=lambda event: print(json.dumps(event.to_json()), flush=True), clock=clock)


# The nursery process

WAYS = {way.__name__: way for way in (command, until_the_pipe_closes, an_hour_late, an_hour_early, everything_twice)}


def _start(how: str, arguments: list[str], log: str, environment: dict[str, str]) -> int:
    child = os.fork()
    if child:
        return child
    try:
        output = os.open(log, os.O_WRONLY | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(0)
        os.environ |= environment
        WAYS[how](arguments)
    except SystemExit as end:
        sys.stdout.flush()
        os._exit(int(end.code or 0))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def _nursery() -> None:
    import torch
    import transformers  # noqa: F401
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3ForCausalLM  # noqa: F401 - imported when first used

    import deltawire.cli.commands.member
    import deltawire.rl.generation
    import deltawire.rl.member  # noqa: F401

    torch.set_num_threads(1)
    children: set[int] = set()
    for line in sys.stdin:
        what, *arguments = json.loads(line)
        if what == "start":
            answer = _start(*arguments)
            children.add(answer)
        else:
            answer = os.waitstatus_to_exitcode(os.waitpid(arguments[0], 0)[1])
            children.discard(arguments[0])
        print(json.dumps(answer), flush=True)
    for child in children:
        os.kill(child, signal.SIGKILL)  # it is not reaped yet, so its id is still valid
        os.waitpid(child, 0)


if __name__ == "__main__":
    _nursery()
