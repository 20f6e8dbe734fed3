# SPDX-License-Identifier: Apache-2.0
"""Where peers reach a server, and how they prove that they may."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybrid_plugin.config import ConfigError, PeerOptions


def test_by_default_only_this_machine_connects() -> None:
    options = PeerOptions.from_value({})
    assert (options.host, options.is_local) == ("127.0.0.1", True)
    assert [options.port(rank) for rank in (0, 3)] == [0, 0]
    assert options.secret() == b""
    assert PeerOptions.from_value(options) is options


def test_ranks_listen_at_consecutive_ports() -> None:
    options = PeerOptions("[::1]:7600")
    assert (options.host, options.is_local) == ("::1", True)
    assert [options.port(rank) for rank in (0, 3)] == [7600, 7603]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (5, "takes an object"),
        ({"listn": ""}, "Unknown entry 'listn'"),
        ({"listen": 7600}, "peers.listen takes a string"),
        ({"listen": None}, "peers.listen takes a string"),
        ({"secret_file": 5}, "peers.secret_file takes a string"),
        ({"listen": "7600"}, "an IP address and a port"),
        ({"listen": "localhost:7600"}, "an IP address and a port"),
        ({"listen": "127.0.0.1:http"}, "an IP address and a port"),
        ({"listen": "127.0.0.1:65536"}, "an IP address and a port"),
        ({"listen": "0.0.0.0:7600"}, "which peers cannot connect to"),
        ({"listen": "[::]:7600"}, "which peers cannot connect to"),
        ({"listen": "192.0.2.1:7600"}, "give peers.secret_file"),
        ({"secret_file": "secret"}, "must be absolute"),
        ({"weights": ""}, "peers.weights is empty"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(value: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("[", r"\[")):
        PeerOptions.from_value(value)


def test_a_secret_is_for_its_user_alone(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    options = PeerOptions("192.0.2.1:7600", str(file))
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        options.secret()
    file.write_text("only peers know this\n")
    file.chmod(0o640)
    with pytest.raises(ConfigError, match="can be read by others: chmod 600"):
        options.secret()
    file.chmod(0o600)
    assert options.secret() == b"only peers know this"
    file.write_text("too short")
    with pytest.raises(ConfigError, match="fewer than 16 bytes"):
        options.secret()
