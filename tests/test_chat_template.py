# SPDX-License-Identifier: Apache-2.0
"""The delimiters of a checkpoint's own chat template."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest

from hybrid_plugin.config import ConfigError, HybridConfig
from hybrid_plugin.core.policy.message_boundaries import Delimiters
from hybrid_plugin.engine.chat_template import delimiters

pytest.importorskip("transformers")

MODEL = Path(__file__).parent / "assets" / "tiny-qwen3-next"
ASKED = HybridConfig(system_snapshot_min_tokens=64)


def read(
    options: HybridConfig,
    tokenizer: Path,
    server_template: str | None = None,
    text: str | None = None,
) -> Delimiters | None:
    return delimiters(
        options,
        str(tokenizer),
        revision=None,
        trust_remote_code=False,
        logger=logging.getLogger("test"),
        server_template=server_template,
        server_template_text=text,
    )


def test_they_are_read_where_an_option_asks() -> None:
    found = read(ASKED, MODEL)
    assert found == Delimiters((257, *b"system\n"), (258,))
    assert read(HybridConfig(), MODEL) is None
    policy = ASKED.snapshot_policy(16, found)
    assert (policy.delimiters, policy.system_min_tokens) == (found, 64)


def test_the_servers_own_template_counts(tmp_path: Path) -> None:
    """What `--chat-template` names renders the chats, not the tokenizer's."""
    file = tmp_path / "template.jinja"
    file.write_text("{% for m in messages %}[{{ m.role }}]{{ m.content }}~{% endfor %}")
    found = read(ASKED, MODEL, str(file))
    assert found == Delimiters(tuple(b"[system]"), tuple(b"~"))


def test_its_text_counts_as_much(caplog: pytest.LogCaptureFixture) -> None:
    text = "{% for m in messages %}[{{ m.role }}]{{ m.content }}~{% endfor %}"
    assert read(ASKED, MODEL, text=text) == Delimiters(tuple(b"[system]"), tuple(b"~"))
    assert read(ASKED, MODEL, text="{{ messages[0].content }}") is None
    assert "the chat template of --chat-template marks no end" in caplog.text


@pytest.mark.parametrize("name", ["llama-2", "missing.jinja", "conversation.json"])
def test_a_template_that_cannot_be_read(tmp_path: Path, name: str) -> None:
    if name.endswith(".json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(ConfigError, match="needs a chat template in Jinja"):
        read(ASKED, MODEL, str(tmp_path / name))
    assert read(HybridConfig(), MODEL, str(tmp_path / name)) is None


def test_without_a_tokenizer_it_is_refused(tmp_path: Path) -> None:
    assert read(HybridConfig(), tmp_path) is None
    with pytest.raises(ConfigError, match="needs the model's tokenizer"):
        read(ASKED, tmp_path)


def test_a_template_without_messages_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for file in MODEL.glob("*token*"):
        shutil.copy(file, tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["chat_template"] = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert read(ASKED, tmp_path) is None
    assert "marks no end of a system message" in caplog.text
