# SPDX-License-Identifier: Apache-2.0
"""The package's model classes in SGLang."""

from __future__ import annotations


def register() -> None:
    """Entry point of `sglang.srt.plugins`: names our classes for what SGLang lacks.

    Raises:
        SystemExit: for options that are not valid: SGLang only logs other errors.
    """
    from hybrid_models.sglang.registration import register_missing
    from hybrid_plugin.engine.refusals import ending_the_server

    with ending_the_server():
        register_missing()
