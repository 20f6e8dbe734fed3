# SPDX-License-Identifier: Apache-2.0
"""SGLang: the adapter, and a platform that runs SGLang without a GPU."""

from __future__ import annotations


def register() -> None:
    """Entry point of `sglang.srt.plugins`: runs first in every SGLang process.

    Adds our flags to the command line.  Where the plugin was asked for, it hooks
    the rest too, or ends the process: SGLang only logs what a plugin raises.

    Raises:
        SystemExit: if the plugin was asked for and does not fit this SGLang.
    """
    from hybrid_plugin.config import ConfigError
    from hybrid_plugin.sglang import activation, patches
    from hybrid_plugin.sglang.log import logger

    asked = False
    try:
        asked = activation.requested()
        patches.hook_command_line()
        if asked:
            patches.hook_engine()
    except ConfigError as error:
        if asked:
            raise SystemExit(f"hybrid-plugin: {error}") from error
        logger.warning("hybrid-plugin is not available: %s", error)
