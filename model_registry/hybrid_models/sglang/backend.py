# SPDX-License-Identifier: Apache-2.0
"""SGLang's backend of our state layers."""

from __future__ import annotations

from sglang.srt.layers.attention.linear.short_conv_backend import ShortConvAttnBackend


class StateBackend(ShortConvAttnBackend):
    """SGLang's for short convolutions, which keeps slots and says which.

    It reads the slots of a pass with prompts from the device, for models that go
    through their sequences on the host, and a pass would wait there for all before it.
    """

    needs_extend_host_mirrors = False
