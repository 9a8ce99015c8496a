"""What is in the chains of `chains/`, which the last release before commits of version 2 wrote. They are never written again.

`chains/v1`: one publisher wrote six versions, of steps 0 to 5, with a skip and an anchor. The next one went back to version 4, and wrote
step 4 once more. `chains/v1-signed`: one publisher that signs wrote two versions; its secret key is forgotten. All have `CONFIG` attached.
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
