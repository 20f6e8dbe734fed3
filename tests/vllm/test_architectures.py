# SPDX-License-Identifier: Apache-2.0
"""What is said of every architecture in vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from hybrid_plugin.engine.architectures import Provider
from hybrid_plugin.engine.outlook import Prospect
from hybrid_plugin.tools.models import page, table
from hybrid_plugin.vllm import architectures, servable

PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"


def test_the_page_is_current() -> None:
    """`hybrid-plugin models --write docs/architectures.md` brings it up to date."""
    assert page.updated(PAGE.read_text(), table.of_installed_engines("vllm")) == (
        PAGE.read_text()
    )


def test_classes_are_known_by_what_they_derive_from() -> None:
    found = {s.architecture: s for s in architectures.standings(["Ours"])}
    assert found["Qwen3NextForCausalLM"].prospect == Prospect.SERVED
    # It derives from a class in another module that derives from a hybrid one.
    assert found["Qwen3_5MoeForConditionalGeneration"].provider == Provider.ENGINE
    assert found["Mamba2ForCausalLM"].prospect == Prospect.SERVED  # states alone
    assert found["Ours"].provider == Provider.OURS
    assert "Terratorch" not in found, "it does not attend, and keeps no states"
    assert "LlamaForCausalLM" not in found


def test_caches_without_pools_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servable, "unknown_kinds", lambda module: ["RingSpec"])
    found = {s.architecture: s for s in architectures.standings([])}
    standing = found["Qwen3NextForCausalLM"]
    assert standing.prospect == Prospect.REFUSED and "RingSpec" in standing.reason


def test_columns_of_other_engines_stay() -> None:
    text = f"before\n{page.BEGIN}\n| `A` | ours | theirs |\n{page.END}\nafter\n"
    updated = page.updated(text, {"vllm": []})
    assert page.columns(updated) == {"vllm": {}, "sglang": {"A": "theirs"}}
    assert updated.startswith("before\n") and updated.endswith("\nafter\n")
    with pytest.raises(ValueError, match="has no lines"):
        page.updated("nothing", {})
