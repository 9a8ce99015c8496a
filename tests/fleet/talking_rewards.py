"""A module of rewards that prints lines while it is imported, and then ends the member in the way that the member's name selects."""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings

name = sys.argv[sys.argv.index("--name") + 1]
print(f"{name} is process {os.getpid()}", flush=True)
if name.startswith("stays"):
    while True:
        time.sleep(60)
if name.startswith("killed"):
    os.kill(os.getpid(), signal.SIGKILL)
warnings.warn(f"{name} warns", stacklevel=1)
for number in range(5000):
    print(f"{name} says line {number} of many lines, and all of them are worth reading")
raise KeyError(f"{name} cannot be imported")
