"""Where listings of a session's files begin and end."""

from __future__ import annotations

import pytest

from deltawire.format.live_parts import MAX_NUMBER
from deltawire.store.live_keys import FEEDBACK, INTERACTIONS, LiveKey, feedback_key, interactions_key, session_folder, start_of_file

SESSION = "g.0123456789abcdef"


@pytest.mark.parametrize(("prefix", "build_key"), [(INTERACTIONS, interactions_key), (FEEDBACK, feedback_key)])
@pytest.mark.parametrize("number", [0, 1, 9, 10, MAX_NUMBER])
def test_a_file_starts_after_the_files_before_it(prefix, build_key, number):
    """Also with the largest hash before it and the smallest of its own, and after the largest number that a key can have."""
    start = start_of_file(prefix, SESSION, number)
    key = build_key(LiveKey(SESSION, number, "0" * 64))
    assert start < key
    assert key.startswith(session_folder(prefix, SESSION))
    assert build_key(LiveKey(SESSION, number, "f" * 64)) < start_of_file(prefix, SESSION, number + 1)
    if number:
        assert build_key(LiveKey(SESSION, number - 1, "f" * 64)) < start


def test_a_name_that_sessions_cannot_have_is_refused():
    with pytest.raises(ValueError, match="session of a gateway"):
        session_folder(INTERACTIONS, "../other")
