# SPDX-License-Identifier: Apache-2.0
"""Costs where no measured ones are given.

The fit makes a short prefill pass dearer (68 ms) than `core/policy/costs.py` has it (10
to 25 ms).  It sees only whole workloads, so it may charge to the pass what passes with
it, such as the host's time; single passes were not measured to tell.
"""

from __future__ import annotations

from hybrid_plugin.tools.plan.shape import ModelShape
from hybrid_plugin.tools.simulate.cost_model import CostModel, Costs

DEFAULT_COSTS = CostModel(
    machine="an NVIDIA H200",
    model="Qwen3-Next's layers with 16 to 64 experts",
    source="fitted to 21 times of vLLM, benchmarks/results/simulated-times.md",
    costs=Costs(
        pass_s=7.1e-3,
        prefill_pass_s=61e-3,
        prefill_token_s=18e-6,
        prefill_pair_s=0.0,
        decode_sequence_s=43e-6,
        kv_token_s=5.1e-9,
        move_s=2.5e-3,
    ),
)


def estimate(shape: ModelShape, flops: float, bandwidth: float) -> CostModel:
    """What a device would take that does nothing but compute and read.

    Launching passes comes on top, and reading the experts that other tokens of a pass
    are for, so this bounds a real engine's times from below.

    Args:
        shape: of the model, on one device.
        flops: operations per second.
        bandwidth: bytes of memory read or written per second.
    """
    costs = Costs(
        pass_s=shape.active_parameters * shape.weight_bytes / bandwidth,
        prefill_pass_s=0.0,
        prefill_token_s=2 * shape.active_parameters / flops,
        prefill_pair_s=sum(g.count * g.pair_flops for g in shape.attention) / flops,
        decode_sequence_s=2 * shape.state_bytes / bandwidth,
        kv_token_s=shape.token_bytes / bandwidth,
        move_s=DEFAULT_COSTS.costs.move_s,
    )
    machine = f"a device of {flops / 1e12:g} TFLOP/s and {bandwidth / 1e12:g} TB/s"
    return CostModel(machine, shape.name, "estimated, without overhead", costs)
