# SPDX-License-Identifier: Apache-2.0
"""What is said of every architecture in vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from hybrid_plugin.engine.architectures import Provider
from hybrid_plugin.engine.outlook import Prospect
from hybrid_plugin.tools.models import page, table
from hybrid_plugin.upstream import matrix
from hybrid_plugin.vllm import architectures, model_sources
from hybrid_plugin.vllm.model_sources import ModelSources

PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"


@pytest.fixture(scope="module")
def sources() -> ModelSources:
    """Of the vLLM that is here: each reads all of its models once."""
    return model_sources.installed()


def test_the_page_is_current(
    monkeypatch: pytest.MonkeyPatch, sources: ModelSources
) -> None:
    """`hybrid-plugin models --write docs/architectures.md` brings it up to date."""
    monkeypatch.setattr(model_sources, "installed", lambda: sources)
    assert page.updated(PAGE.read_text(), table.of_installed_engines("vllm")) == (
        PAGE.read_text()
    )


def test_classes_are_known_by_what_they_derive_from(sources: ModelSources) -> None:
    found = {s.architecture: s for s in architectures.standings(["Ours"], sources)}
    assert found["Qwen3NextForCausalLM"].prospect == Prospect.SERVED
    # It derives from a class in another module that derives from a hybrid one.
    assert found["Qwen3_5MoeForConditionalGeneration"].provider == Provider.ENGINE
    assert found["Mamba2ForCausalLM"].prospect == Prospect.SERVED  # states alone
    assert found["Ours"].provider == Provider.OURS
    assert "Terratorch" not in found, "it does not attend, and keeps no states"
    assert "LlamaForCausalLM" not in found


def test_caches_without_pools_are_named(
    monkeypatch: pytest.MonkeyPatch, sources: ModelSources
) -> None:
    monkeypatch.setattr(
        ModelSources, "kinds_without_pools", lambda self, module: ["RingSpec"]
    )
    found = {s.architecture: s for s in architectures.standings([], sources)}
    standing = found["Qwen3NextForCausalLM"]
    assert standing.prospect == Prospect.REFUSED and "RingSpec" in standing.reason


def test_columns_of_other_engines_stay() -> None:
    row = "| `A` | new, served | ours | theirs, served |"
    text = f"before\n{page.BEGIN}\n{row}\n{page.END}\nafter\n"
    updated = page.updated(text, {"vllm": []})
    assert page.columns(updated) == {
        page.RELEASE: {"A": "new, served"},
        "vllm": {},
        "sglang": {"A": "theirs, served"},
    }
    assert f"and SGLang {_version('sglang')}: 1.\n" in updated
    assert updated.startswith("before\n") and updated.endswith("\nafter\n")
    with pytest.raises(ValueError, match="has no lines"):
        page.updated("nothing", {})


def _version(engine: str) -> str:
    rows = [row for row in matrix.load() if row.platform == "cpu"]
    return matrix.newest(rows, engine).version


def test_source_says_what_vllm_says() -> None:
    from vllm.model_executor.models import registry
    from vllm.v1 import kv_cache_interface

    found = model_sources.installed()
    assert found.names == set(registry._VLLM_MODELS)
    written = registry._TEXT_GENERATION_MODELS | registry._MULTIMODAL_MODELS
    assert {name: cls for name, (_, cls) in found.generating.items()} == {
        name: cls for name, (_, cls) in written.items()
    }
    spec = kv_cache_interface.KVCacheSpec
    kinds = {
        name
        for name, value in vars(kv_cache_interface).items()
        if isinstance(value, type) and issubclass(value, spec)
    }
    assert found.kinds_of_caches == kinds


def test_rings_are_seen_in_source(sources: ModelSources) -> None:
    found = {s.architecture: s for s in architectures.standings([], sources)}
    assert found["Glm5NextForCausalLM"].prospect == Prospect.REFUSED
    assert "CircularBufferSpec" in found["Glm5NextForCausalLM"].reason
    assert found["Qwen4ExpForCausalLM"].prospect != Prospect.REFUSED


_RELEASE = {
    "model_executor/models/registry.py": """
_TEXT_GENERATION_MODELS = {"A": ("a", "A"), "B": ("vllm.models.b", "B")}
_MULTIMODAL_MODELS = {"C": ("vllm.models.c", "C")}
_OTHERS = {"D": ("a", "D"), **{k: v for k, v in _MULTIMODAL_MODELS.items()}}
_VLLM_MODELS = {**_TEXT_GENERATION_MODELS, **_MULTIMODAL_MODELS, **_OTHERS}
""",
    "model_executor/models/a.py": "class A(Base): ...\nclass Base(IsHybrid): ...",
    "models/b/__init__.py": "from .gpu.model import B",
    "models/b/gpu/model.py": "class B(IsHybrid): ...",
    "models/c/__init__.py": "",
    "models/c/cpu/model.py": "class C(IsHybrid):\n    def f(s): return RingSpec(1)",
    "v1/kv_cache_interface.py": """
class KVCacheSpec: ...
class RingSpec(KVCacheSpec): ...
""",
}


def test_a_release_is_read_without_being_installed(tmp_path: Path) -> None:
    for name, text in _RELEASE.items():
        file = tmp_path / "vllm" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    found = {s.architecture: s for s in table.of_release(tmp_path)}
    words = {name: table.words(s, "vllm") for name, s in found.items()}
    assert words["A"] == "vLLM's class, served"
    assert words["B"] == "vLLM's class, served on GPUs alone"
    assert words["C"].startswith("vLLM's class, refused: it keeps caches of the kind R")
    assert words["BambaForCausalLM"] == "our class, served"
    assert "D" not in words
    assert model_sources.ModelSources(tmp_path / "vllm").names == {*"ABCD"}
