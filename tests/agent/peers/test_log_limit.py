from __future__ import annotations

import logging

from arpc.agent.peers.log_limit import LogLimit


def test_a_flood_is_told_in_a_few_lines(caplog):
    now = [1000.0]
    complaints = LogLimit(logging.getLogger("arpc.test"), lambda: now[0])
    for number in range(500):
        complaints.log(logging.WARNING, "stranger %d", number)
    assert len(caplog.records) == 20
    now[0] += 61
    complaints.log(logging.WARNING, "stranger %d", 500)
    assert [record.getMessage() for record in caplog.records[20:]] == [
        "480 more like these were not logged",
        "stranger 500",
    ]


def test_what_nobody_would_read_does_not_count(caplog):
    caplog.set_level(logging.WARNING, "arpc.test")
    complaints = LogLimit(logging.getLogger("arpc.test"), lambda: 1000.0)
    for number in range(500):
        complaints.log(logging.DEBUG, "a member that tries again %d", number)
    complaints.log(logging.WARNING, "a stranger")
    assert [record.getMessage() for record in caplog.records] == ["a stranger"]
