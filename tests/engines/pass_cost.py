# SPDX-License-Identifier: Apache-2.0
"""What a forward pass costs, as the cache of an engine under test believes."""

from __future__ import annotations

from hybrid_plugin.core.policy import costs


def as_on_cpu() -> None:
    """A pass costs on any device what it costs on a CPU, in this process.

    Prompts of tests are short: on a GPU none would repay a pause for a snapshot.
    """
    costs.PASS_TOKENS = costs.CPU_PASS_TOKENS
