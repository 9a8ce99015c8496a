"""The engines of the live demo: small OpenAI-compatible servers, each of which follows a channel. All run in this process."""

from __future__ import annotations

import argparse
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "demo"))

import torch
from child import tell, told_to_stop

from deltawire import ReaderOptions
from deltawire.errors import DeltawireError
from deltawire.events import Event
from deltawire.rl.serving.openai_server import serve_openai

POLL = 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("channels", nargs="+", help="the channel of each engine")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    stop = told_to_stop()
    threads = [
        threading.Thread(target=serve, args=(arguments.url, f"{channel}-{number}", channel, stop))
        for number, channel in enumerate(arguments.channels)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def serve(url: str, name: str, channel: str, stop: threading.Event) -> None:
    """Serve until `stop` is set. Wait first until the channel exists."""

    def on_event(event: Event) -> None:
        if event.name == "swapped":
            tell("swapped", engine=name, channel=channel, seq=event.fields["seq"])

    while not stop.is_set():
        try:
            serve_openai(
                url,
                reading=ReaderOptions(channel=channel, pin=False),
                poll=POLL,
                stop=stop,
                on_ready=lambda address: tell("serving", engine=name, channel=channel, url=address),
                on_event=on_event,
            )
        except DeltawireError as error:
            if not error.retryable:
                raise
            stop.wait(POLL)


if __name__ == "__main__":
    main()
