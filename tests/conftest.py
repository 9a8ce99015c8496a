"""Set one Hypothesis profile for all tests, with the same examples on every run and no deadlines. Make Ctrl-C work in child processes.

All processes of the tests check the events that they emit.
"""

import gc
import os
import signal
import sys

from hypothesis import HealthCheck, settings
from thorough import MORE

settings.register_profile(
    "deltawire",
    derandomize=MORE == 1,
    print_blob=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("deltawire")

os.environ["DELTAWIRE_CHECK_EVENTS"] = "1"  # for child processes
if registry := sys.modules.get("deltawire.events.registry"):  # pytest has imported it already, because its settings name our warnings
    registry.CHECKS = True

# A shell makes its background processes ignore Ctrl-C, and children would inherit that. Tests send Ctrl-C to children.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Let the garbage collector pass over the modules and tests that were loaded, which stay until the end."""
    gc.collect()
    gc.freeze()
