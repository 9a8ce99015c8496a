"""The thread that makes shortcuts."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from deltawire.publish.shortcuts.job_thread import JobThread


@pytest.mark.skipif(sys.platform != "linux", reason="priorities of threads are those of Linux")
def test_jobs_have_a_lower_priority_than_the_threads_of_the_caller():
    def priority():
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def job():
        found.append(priority())
        thread = threading.Thread(target=lambda: found.append(priority()))  # the codec starts threads, too
        thread.start()
        thread.join()

    own, found = priority(), []
    jobs = JobThread("jobs")
    jobs.do(job)
    jobs.close()
    lower = min(own + 5, 19)
    assert found == [lower, lower]
    assert priority() == own


def test_jobs_are_done_where_priorities_may_not_change(monkeypatch):
    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", refuse)
    done = []
    jobs = JobThread("jobs")
    jobs.do(lambda: done.append(1))
    jobs.close()
    assert done == [1]
