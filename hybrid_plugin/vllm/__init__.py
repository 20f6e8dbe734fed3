# SPDX-License-Identifier: Apache-2.0
"""The vLLM adapter: translates between vLLM's scheduler and workers and the core.

vLLM calls `register` in every process it starts (entry point group
`vllm.general_plugins`), before it reads its own configuration.
"""


def register() -> None:
    """Hook vLLM so that hybrid models are served with the plugin.

    Idempotent.  Hooks do nothing for engines that the plugin is not active for.
    """
    from hybrid_plugin.vllm import patches

    patches.apply()
