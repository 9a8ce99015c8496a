"""The widths of links are remembered for a time, and only some of them."""

from __future__ import annotations

from deltawire.store.streams.known_links import KnownLinks


def test_the_newest_widths_are_known_for_an_hour():
    now = [0.0]
    known = KnownLinks(clock=lambda: now[0])
    assert known.width("a", 4) == 4
    known.note("a", 30)
    now[0] = 3600.0
    assert known.width("a", 4) == 30
    now[0] = 3601.0
    assert known.width("a", 4) == 4
    for number in range(100):
        known.note(f"link {number}", number)
    assert known.width("link 35", 4) == 4
    assert known.width("link 36", 4) == 36
