"""Describe the chains in `chains/`. The last release before commits of version 2 wrote them, and they are never written again.

`chains/v1`: one publisher wrote six versions, of steps 0 to 5, with a skip and an anchor. The next publisher rewound to version 4 and wrote
step 4 again. `chains/v1-signed`: one publisher wrote two signed versions; its secret key was not kept. All have `CONFIG` attached.
"""

from __future__ import annotations

from pathlib import Path

from toy_chain import State, first_state, next_state

from deltawire.publish.shortcuts.cadence import AnchorPolicy
from deltawire.publish.writer_options import WriterOptions

HERE = Path(__file__).resolve().parent / "chains"
OPTIONS = WriterOptions(segment_bytes=800, anchor_policy=AnchorPolicy(min_versions=4, max_versions=4), threads=1)
CONFIG = {"config.json": b'{"model_type": "toy"}'}


def state_at(step: int) -> State:
    """Return the weights of a step."""
    return first_state() if step == 0 else next_state(state_at(step - 1), step)
