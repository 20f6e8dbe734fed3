# SPDX-License-Identifier: Apache-2.0
"""Hybrid prefix cache for vLLM and SGLang: separate KV pages and state slots.

The engine-neutral cache is `hybrid_plugin.core`; one sub-package per engine
translates between it and that engine.
"""

__version__ = "0.1.0"
