"""The gateway of the live demo. It does the work of `deltawire gateway --from URL --engine CHANNEL=URL …`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "demo"))

from child import tell, told_to_stop

from deltawire.gateway import GatewayOptions, serve_gateway
from deltawire.gateway.options import EngineAddress


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("journal", type=Path)
    parser.add_argument("engines", nargs="+", metavar="CHANNEL=URL")
    arguments = parser.parse_args()
    options = GatewayOptions([EngineAddress.parse(text) for text in arguments.engines], journal=arguments.journal, probe=0.1, flush=0.5)
    stop = told_to_stop()
    serve_gateway(arguments.url, options, stop=stop, on_ready=lambda address: tell("serving", url=address))


if __name__ == "__main__":
    main()
