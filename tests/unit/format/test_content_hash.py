"""A forked child hashes correctly although it does not have the threads of its parent."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

FORKED_AFTER_HASHING = """
import os
import numpy as np
from deltawire import apply_delta, encode_delta

old, new = ({"w": np.random.default_rng(seed).integers(0, 2**16, 1 << 20, np.uint16)} for seed in (1, 2))
delta = encode_delta(old, new, threads=2)
assert len(delta) > 1 << 20
apply_delta({"w": old["w"].copy()}, delta)
child = os.fork()
if child == 0:
    assert encode_delta(old, new, threads=2) == delta
    apply_delta(old, delta)
    os._exit(0 if np.array_equal(old["w"], new["w"]) else 1)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_hashes_without_the_threads_of_its_parent():
    process = subprocess.Popen([sys.executable, "-W", "ignore", "-c", FORKED_AFTER_HASHING], start_new_session=True)
    try:
        assert process.wait(120) == 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 9)  # this also ends the forked child, which hangs
            process.wait()
