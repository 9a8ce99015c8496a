"""One Hypothesis profile for all tests: the same examples on every run, and no failures for want of speed."""

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
