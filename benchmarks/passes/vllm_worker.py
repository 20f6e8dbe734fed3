# SPDX-License-Identifier: Apache-2.0
"""vLLM: what is mixed into its worker, by `worker_extension_cls`."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.passes import compiled
from benchmarks.passes.log import Log, Pass

CLASS = f"{__name__}.CountedWorker"


class CountedWorker:
    """A worker that writes down its passes, once asked to."""

    def count_passes(self) -> None:
        """Begin; to be called by `collective_rpc`."""
        compiled.watch()
        _Counter(self)


class _Counter:
    """Wraps the two calls that make a pass: `execute_model`, then `sample_tokens`."""

    def __init__(self, worker: Any) -> None:
        self._log = Log()
        self._execute = worker.execute_model
        self._sample = worker.sample_tokens
        self._began = 0.0
        self._contents = (0, 0, 0)
        worker.execute_model = self.execute_model
        worker.sample_tokens = self.sample_tokens

    def execute_model(self, scheduled: Any) -> Any:
        self._began = time.monotonic()
        self._contents = contents(scheduled)
        output = self._execute(scheduled)
        return output if output is None else self._launched(output)

    def sample_tokens(self, grammar: Any) -> Any:
        return self._launched(self._sample(grammar))

    def _launched(self, output: Any) -> Any:
        """Write the pass down, at once or when its result is fetched."""
        began, of_pass, launched = self._began, self._contents, time.monotonic()
        if not any(of_pass):
            return output

        def write() -> None:
            self._log.append(Pass(began, launched, time.monotonic(), *of_pass))

        if not hasattr(output, "get_output"):
            write()
            return output
        fetch = output.get_output

        def get_output() -> Any:
            del output.get_output  # a cycle would keep its tensors
            result = fetch()
            write()
            return result

        output.get_output = get_output
        return output


def contents(scheduled: Any) -> tuple[int, int, int]:
    """Prefill tokens, prefilled sequences and decoding sequences of a pass.

    Args:
        scheduled: vLLM's `SchedulerOutput`.
    """
    cached = scheduled.scheduled_cached_reqs
    decoding = {
        name
        for name, generated in zip(
            cached.req_ids, cached.num_output_tokens, strict=True
        )
        if generated and name not in cached.resumed_req_ids
    }
    prefills = [
        tokens
        for name, tokens in scheduled.num_scheduled_tokens.items()
        if name not in decoding
    ]
    decodes = len(scheduled.num_scheduled_tokens) - len(prefills)
    return sum(prefills), len(prefills), decodes
