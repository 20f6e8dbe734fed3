# SPDX-License-Identifier: Apache-2.0
"""`selective` without a gate, for layers that apply it themselves.

Other layers may then use the recurrence's output as well, as in SambaY.  Shapes are
those of `selective` where channels have a state each.
"""

from __future__ import annotations

import torch

from hybrid_plugin.mixers import selective
from hybrid_plugin.mixers.prefills import Prefills
from hybrid_plugin.mixers.selective import Weights


def prefill(
    weights: Weights,
    prefills: Prefills,
    x: torch.Tensor,
    conv_states: torch.Tensor,
    states: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `selective.prefill`."""
    return selective.prefill(weights, prefills, x, None, conv_states, states, out)


def decode(
    weights: Weights,
    slots: torch.Tensor,
    x: torch.Tensor,
    conv_states: torch.Tensor,
    states: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `selective.decode`."""
    return selective.decode(weights, slots, x, None, conv_states, states, out)
