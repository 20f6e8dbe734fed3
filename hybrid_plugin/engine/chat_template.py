# SPDX-License-Identifier: Apache-2.0
"""The delimiters of a model's chat template, for engines that leave it elsewhere.

Both engines render chats in another process than the one that schedules, so the
tokenizer is loaded once more, at start-up, where the option asks for it.
"""

from __future__ import annotations

import logging
from pathlib import Path

from hybrid_plugin.config import ConfigError, HybridConfig
from hybrid_plugin.core.policy.message_boundaries import Delimiters


def delimiters(
    options: HybridConfig,
    tokenizer: str,
    *,
    revision: str | None,
    trust_remote_code: bool,
    logger: logging.Logger,
    server_template: str | None = None,
    server_template_text: str | None = None,
) -> Delimiters | None:
    """What ends a message, if the options want to know.

    Args:
        options: of the plugin.
        tokenizer: its folder or name.
        revision: of a name.
        trust_remote_code: as the engine was told.
        logger: the adapter's.
        server_template: what the server's own flag names in place of the tokenizer's
            template: a file, or a name that the engine knows.
        server_template_text: the Jinja text of that template, where the engine has read
            it already.

    Returns:
        None if no option asks for it, and, with a warning, if the template has no
        such thing.

    Raises:
        ConfigError: if the option asks for it and the tokenizer, or the server's
            template, cannot be read.
    """
    if options.system_snapshot_min_tokens is None:
        return None
    from transformers import AutoTokenizer

    try:
        template = AutoTokenizer.from_pretrained(
            tokenizer, revision=revision, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"system_snapshot_min_tokens needs the model's tokenizer, and {tokenizer} "
            f"has none that loads ({error}); leave the option out."
        ) from error
    if server_template is not None:
        server_template_text = _read(server_template)
    if server_template_text is not None:
        template.chat_template = server_template_text
    found = Delimiters.of_template(template)
    if found is None:
        logger.warning(
            "hybrid-plugin: the chat template of %s marks no end of a system message; "
            "system_snapshot_min_tokens does nothing.",
            tokenizer if server_template_text is None else "--chat-template",
        )
    return found


def _read(server_template: str) -> str:
    """The Jinja text of a template that the server was given.

    Raises:
        ConfigError: for anything but a file with one.
    """
    file = Path(server_template)
    try:
        if file.suffix != ".json":
            return file.read_text()
    except (OSError, ValueError):
        pass  # said below
    raise ConfigError(
        f"system_snapshot_min_tokens needs a chat template in Jinja, and "
        f"--chat-template {server_template} names no such file; leave one of them out."
    )
