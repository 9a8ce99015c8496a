"""Servers for these tests. The logs of the servers are shown with each test that fails."""

from __future__ import annotations

from collections.abc import Generator

import pytest
from servers import Server, azurite, moto, rclone, seaweedfs

__all__ = ["azurite", "moto", "rclone", "seaweedfs"]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and isinstance(item, pytest.Function):
        for server in (value for value in item.funcargs.values() if isinstance(value, Server)):
            report.sections.append((f"log of {server.name}", server.log_tail()))
    return report
