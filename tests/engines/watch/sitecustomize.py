# SPDX-License-Identifier: Apache-2.0
"""Looks at the memory of elastic pools, in the process that moves it.

Loaded through PYTHONPATH.  Before memory is taken away, when that is most, after all
moves of a step, and every now and then, it writes what is mapped, and what the kernel
says is resident, to a file.  With
HYBRID_TEST_PAGES_APART no pages are packed, as with a backend that does not take it.
"""

import json
import os
import sys
import threading
import time


def _watch(report: str) -> None:
    from hybrid_plugin.core.commands import Pool
    from hybrid_plugin.device.executor import Executor

    run, lock = Executor.run, threading.Lock()
    pools = Pool.KV, Pool.STATE, Pool.SCRATCH
    most = {"most_mapped": 0, "most_resident": 0}
    most |= {f"{what}_{p}": 0 for what in ("grown", "most_mapped") for p in pools}
    seen = []

    def look() -> None:
        from tests.core.resident import resident_each

        arenas = seen[0]._arenas
        memory = arenas[Pool.KV]._memory
        there = [pool for pool in pools if pool in arenas]
        sizes = resident_each([arenas[pool]._place for pool in there])
        found = {
            f"resident_{pool}": size for pool, size in zip(there, sizes, strict=True)
        }
        resident_now = sum(sizes)
        for pool in there:
            mapped = sum(arenas[pool]._place.backed) * memory.block_bytes
            found[f"mapped_{pool}"] = mapped
            most[f"most_mapped_{pool}"] = max(most[f"most_mapped_{pool}"], mapped)
        most["most_mapped"] = max(most["most_mapped"], memory.mapped)
        most["most_resident"] = max(most["most_resident"], resident_now)
        found |= {"mapped": memory.mapped, "budget": memory.usable} | most
        with open(report + ".new", "w") as file:
            json.dump(found, file)
        os.replace(report + ".new", report)

    def now_and_then() -> None:
        from tests.engines.watch import PERIOD_S

        while True:
            time.sleep(PERIOD_S)
            with lock:
                look()

    def watched(executor, commands):  # type: ignore[no-untyped-def]
        with lock:
            for command in commands:
                kind = type(command).__name__
                if kind == "Map":
                    most[f"grown_{command.pool}"] += len(command.granules)
                elif kind == "Unmap" and seen:
                    look()
                run(executor, [command])
            if seen and commands:
                look()
            elif not seen:
                seen.append(executor)
                look()
                threading.Thread(target=now_and_then, daemon=True).start()

    Executor.run = watched  # type: ignore[method-assign]


def _keep_apart() -> None:
    from hybrid_plugin.core.memory.layout import CacheLayout

    init = CacheLayout.__init__

    def apart(self, *args, packed=False, **kwargs):  # type: ignore[no-untyped-def]
        init(self, *args, packed=False, **kwargs)

    CacheLayout.__init__ = apart  # type: ignore[method-assign]


if "HYBRID_TEST_PAGES_APART" in os.environ:
    _keep_apart()
if os.environ.get("HYBRID_TEST_WATCH") and "multiprocessing" in " ".join(sys.orig_argv):
    _watch(os.environ["HYBRID_TEST_WATCH"])
