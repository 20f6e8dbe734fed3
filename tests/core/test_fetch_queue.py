# SPDX-License-Identifier: Apache-2.0
"""When a fetch could run, by those before it."""

from __future__ import annotations

from hybrid_plugin.core.tiers.fetch_queue import FetchQueue


def test_one_reader_has_one_after_the_other() -> None:
    queue = FetchQueue(1)
    assert queue.seconds(10.0) == 0.0
    queue.add(10.0, 5.0)
    assert (queue.seconds(10.0), queue.seconds(13.0), queue.seconds(15.0)) == (5, 2, 0)
    queue.add(10.0, 3.0)
    assert queue.seconds(10.0) == 8.0
    queue.add(100.0, 1.0)
    assert queue.seconds(100.0) == 1.0


def test_several_readers_have_some_beside_each_other() -> None:
    queue = FetchQueue(2)
    queue.add(0.0, 8.0)
    assert queue.seconds(0.0) == 0.0
    queue.add(0.0, 3.0)
    assert queue.seconds(0.0) == 3.0
    queue.add(0.0, 1.0)  # behind the shorter one
    assert queue.seconds(0.0) == 4.0
    queue.add(0.0, 9.0)
    assert queue.seconds(0.0) == 8.0


def test_nothing_is_waited_for_when_all_are_over() -> None:
    queue = FetchQueue(2)
    for _ in range(4):
        queue.add(0.0, 50.0)
    queue.clear(2.0)
    assert queue.seconds(2.0) == 0.0
    queue.add(2.0, 4.0)
    assert queue.seconds(2.0) == 0.0
