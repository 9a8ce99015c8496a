"""One Hypothesis profile for all tests: the same examples on every run, and no failures for want of speed. And Ctrl-C that is heard."""

import signal

from hypothesis import HealthCheck, settings

settings.register_profile(
    "deltawire",
    derandomize=True,
    print_blob=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("deltawire")

# A shell starts what it puts into the background with Ctrl-C ignored, and children would inherit that: tests send it to them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
