"""Clients that stream completions from a vLLM server, and write down when each token arrives.

    python gpu_engine_clients.py URL CLIENTS TOKENS

It is a process of its own, so that no other work delays it. It prints a line as soon as every client has a token. When its input ends, it
prints one JSON object and ends: `stamps` (for each client, the times of its tokens on the monotonic clock; null begins a request), `whole`
(the number of requests that ended with all their tokens), `short` (with fewer) and `errors`.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import urllib.request


class Clients:
    """Requests completions all the time.

    Parameters
    ----------
    url
        The URL of the server.
    count
        The number of clients.
    tokens
        The number of tokens of each completion.
    """

    def __init__(self, url: str, count: int, tokens: int) -> None:
        self._url = url
        self._tokens = tokens
        self.stamps: list[list[float | None]] = [[] for _ in range(count)]
        self.whole = self.short = 0
        self.errors: list[str] = []
        self._began = [threading.Event() for _ in range(count)]
        for number in range(count):
            threading.Thread(target=self._ask_again, args=(number,), daemon=True).start()

    def wait(self) -> None:
        """Return when every client has received a token, or has failed."""
        for event in self._began:
            event.wait()

    def _ask_again(self, number: int) -> None:
        try:
            while True:
                self.stamps[number].append(None)
                count = self._ask(number)
                self.whole += count == self._tokens
                self.short += count != self._tokens
        except Exception as error:
            self.errors.append(repr(error))
            self._began[number].set()

    def _ask(self, number: int) -> int:
        body = {"model": "m", "prompt": [10 + number, 20, 30], "max_tokens": self._tokens, "temperature": 0, "ignore_eos": True}
        data = json.dumps({**body, "stream": True, "return_token_ids": True}).encode()
        request = urllib.request.Request(f"{self._url}/v1/completions", data=data, headers={"Content-Type": "application/json"})
        count = 0
        with urllib.request.urlopen(request, timeout=600) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    choices = json.loads(line[6:])["choices"]
                    got = len(choices[0].get("token_ids") or ()) if choices else 0
                    if got:
                        self.stamps[number].extend([time.monotonic()] * got)
                        self._began[number].set()
                    count += got
        return count


if __name__ == "__main__":
    clients = Clients(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    clients.wait()
    print("begun", flush=True)
    sys.stdin.read()
    told = {"stamps": clients.stamps, "whole": clients.whole, "short": clients.short, "errors": clients.errors}
    print(json.dumps(told), flush=True)
    os._exit(0)  # requests are still running
