# SPDX-License-Identifier: Apache-2.0
"""The adapter's logger."""

from __future__ import annotations

import logging

# A name below "sglang" makes SGLang's log configuration show the lines.
logger = logging.getLogger("sglang.hybrid_plugin")
