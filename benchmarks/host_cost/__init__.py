# SPDX-License-Identifier: Apache-2.0
"""Drivers of prefix caches for `benchmarks/core_host_cost.py`."""
