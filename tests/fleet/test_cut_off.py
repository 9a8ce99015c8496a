"""A member loses its connection to the store. It keeps its policy, waits, and continues, while others do its work."""

from __future__ import annotations

import signal
from pathlib import Path
from urllib.parse import urlsplit

from cable import Cable
from member_nursery import MemberNursery, wait_until
from servers import Server, moto  # noqa: F401
from small_run import TASKS, SmallRun

POLL = 0.25
"""Seconds between polls. Each request takes the server of this test some milliseconds of a core."""
LENGTH, HELD = ("--env", "rewards_for_tests:length"), ("--env", "rewards_for_tests:held")


def test_a_member_that_was_cut_off_comes_back_and_what_it_had_made_is_not_trained_twice(tmp_path: Path, moto: Server) -> None:  # noqa: F811
    url = moto.fresh_url()
    port = urlsplit(moto.environment["AWS_ENDPOINT_URL"]).port
    assert port is not None
    cable = Cable(port)
    store = moto.open(url)
    run = SmallRun(tmp_path, store, lease_seconds=2, poll_seconds=POLL)
    hold = tmp_path / "hold"
    hold.touch()
    with MemberNursery(tmp_path, moto.environment) as nursery:
        behind = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{cable.port}", "DELTAWIRE_TEST_HOLD": str(hold)}
        lonely = nursery.start("lonely", "--from", url, *HELD, "--poll", str(POLL), environment=behind)
        run.open(1)
        wait_until(lambda: (run.fleet.poll(), hold.with_suffix(".reached").exists())[1], lonely.log)
        other = nursery.start("other", "--from", url, *LENGTH, "--poll", str(POLL))
        other.wait_for("rollout-uploaded", TASKS - 1)
        cable.cut()
        hold.unlink()  # the member now has a result, but cannot upload it
        lonely.wait_for("generated")
        batch = run.train()
        assert {rollouts.member for rollouts in batch.rollouts} == {"other"}
        run.train()
        assert not lonely.events("rollout-uploaded")
        cable.mend()
        lonely.wait_for("rollout-uploaded")
        newest = run.versions[run.step].seq
        wait_until(lambda: lonely.events("swapped")[-1]["seq"] == newest, "it has caught up")
        wait_until(lambda: (run.fleet.poll(), run.members()["lonely"].step == run.step)[1], "it has said so")
        made = len(lonely.events("rollout-uploaded"))
        while len(lonely.events("rollout-uploaded")) == made:
            run.train()
        run.check()

        cable.cut()
        lonely.signal(signal.SIGTERM)  # the member leaves although it cannot write to the store
        assert lonely.ended() == 0, lonely.log()
        run.train()
        run.check()
        run.fleet.stop()
        assert other.ended() == 0, other.log()
    run.close()
    store.close()
