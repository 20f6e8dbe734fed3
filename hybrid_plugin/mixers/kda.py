# SPDX-License-Identifier: Apache-2.0
"""Kimi delta attention: `DeltaNet` with one decay per key channel and token."""

from __future__ import annotations

from hybrid_kernels import kda

from hybrid_plugin.mixers.delta_net import DeltaNet, Weights

__all__ = ["Weights", "decode", "prefill", "verify"]

_NET = DeltaNet(kda)
prefill, decode, verify = _NET.prefill, _NET.decode, _NET.verify
