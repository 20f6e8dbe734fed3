# SPDX-License-Identifier: Apache-2.0
"""SGLang: its scheduler's process, with passes written down."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from benchmarks.passes import compiled
from benchmarks.passes.log import Log, Pass


def run_scheduler(*args: Any, **kwargs: Any) -> None:
    """In place of SGLang's `run_scheduler_process`."""
    from sglang.srt.managers import scheduler
    from sglang.srt.plugins import load_plugins

    load_plugins()  # what they hook belongs to what is measured
    count_passes(scheduler.Scheduler, Log())
    compiled.watch()
    scheduler.run_scheduler_process(*args, **kwargs)


def count_passes(scheduler: type[Any], log: Log) -> None:
    """Have a class of schedulers write down their passes.

    SGLang handles results in the order of launches.  A result counts as there when it
    has been handled, which is when its tokens are on their way to the clients.
    """
    launch, handle = scheduler.run_batch, scheduler.process_batch_result
    flying: deque[tuple[float, float, tuple[int, int, int]]] = deque()

    def run_batch(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        began, of_pass = time.monotonic(), contents(batch)
        result = launch(self, batch, *args, **kwargs)
        flying.append((began, time.monotonic(), of_pass))
        return result

    def process_batch_result(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        handled = handle(self, batch, *args, **kwargs)
        began, launched, of_pass = flying.popleft()
        if any(of_pass):
            log.append(Pass(began, launched, time.monotonic(), *of_pass))
        return handled

    scheduler.run_batch = run_batch
    scheduler.process_batch_result = process_batch_result


def contents(batch: Any) -> tuple[int, int, int]:
    """Prefill tokens, prefilled sequences and decoding sequences of a pass.

    Args:
        batch: SGLang's `ScheduleBatch`, about to run.
    """
    mode, count = batch.forward_mode, len(batch.reqs)
    if mode.is_decode():
        return 0, 0, count
    if not mode.is_extend():
        return 0, 0, 0
    decodes = len(batch.decoding_reqs or ()) if mode.is_mixed() else 0
    return batch.extend_num_tokens - decodes, count - decodes, decodes
