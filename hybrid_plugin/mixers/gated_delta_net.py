# SPDX-License-Identifier: Apache-2.0
"""Gated delta net: `DeltaNet` with one decay per value head and token."""

from __future__ import annotations

from hybrid_kernels import gated_delta_rule

from hybrid_plugin.mixers.delta_net import DeltaNet, Weights

__all__ = ["Weights", "decode", "prefill", "verify"]

_NET = DeltaNet(gated_delta_rule)
prefill, decode, verify = _NET.prefill, _NET.decode, _NET.verify
