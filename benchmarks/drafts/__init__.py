# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding in a real engine: shapes, sides, traffic, and what it tells."""
