# SPDX-License-Identifier: Apache-2.0
"""Which part of the plugin may import which, and what may be imported at all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import hybrid_models
import pytest

import hybrid_plugin
from tests.import_graph import Import, Rule, When, circles, is_below, scan

PROJECT = "hybrid_plugin"
ENGINES = ("vllm", "sglang", "sgl_kernel")
ADAPTERS = (f"{PROJECT}.vllm", f"{PROJECT}.sglang", f"{PROJECT}.sglang_cpu")

RULES = (
    Rule(
        f"{PROJECT}.core",
        allowed=(f"{PROJECT}.core",),
        forbidden=(*ENGINES, "torch", "triton", "transformers", "hybrid_kernels"),
    ),
    Rule(
        f"{PROJECT}.mixers",
        allowed=(f"{PROJECT}.mixers", f"{PROJECT}.core"),
        forbidden=ENGINES,
    ),
    Rule(
        f"{PROJECT}.tiers",
        allowed=(f"{PROJECT}.core", f"{PROJECT}.errors", f"{PROJECT}.sizes"),
        forbidden=(*ENGINES, "torch", "triton", "transformers", "hybrid_kernels"),
    ),
    Rule(f"{PROJECT}.device", allowed=(f"{PROJECT}.core",), forbidden=ENGINES),
    Rule(
        f"{PROJECT}.engine",
        allowed=(
            f"{PROJECT}.config",
            f"{PROJECT}.core",
            f"{PROJECT}.device",
            f"{PROJECT}.sizes",
            f"{PROJECT}.tiers",
        ),
        forbidden=ENGINES,
    ),
    Rule(f"{PROJECT}.upstream", forbidden=(*ENGINES, *ADAPTERS, "torch")),
    Rule(
        f"{PROJECT}.vllm",
        forbidden=("sglang", "sgl_kernel", *ADAPTERS[1:], f"{PROJECT}.tools"),
    ),
    Rule(
        f"{PROJECT}.sglang",
        forbidden=("vllm", ADAPTERS[0], ADAPTERS[2], f"{PROJECT}.tools"),
    ),
    Rule(
        f"{PROJECT}.sglang_cpu",
        forbidden=("vllm", ADAPTERS[0], f"{PROJECT}.tools"),
    ),
)

MODELS = "hybrid_models"
NEUTRAL_MODELS = (
    "architecture",
    "architectures",
    "blocks",
    "catalogue",
    "kit",
    "mixers",
    "sharding",
    "tiling",
    "weights",
)
"""Parts of the model registry that are written once."""
MODEL_RULES = (
    *(
        Rule(
            f"{MODELS}.{part}",
            allowed=(MODELS,),
            forbidden=(
                *ENGINES,
                *ADAPTERS,
                f"{MODELS}.vllm",
                f"{MODELS}.sglang",
            ),
        )
        for part in NEUTRAL_MODELS
    ),
    Rule(f"{MODELS}.vllm", forbidden=("sglang", ADAPTERS[1], f"{MODELS}.sglang")),
    Rule(f"{MODELS}.sglang", forbidden=("vllm", ADAPTERS[0], f"{MODELS}.vllm")),
)

CPU_FROM_SGLANG = {f"{PROJECT}.sglang.activation"}
"""What the CPU platform takes from SGLang's adapter: how it finds out which platform
was chosen, which both must answer alike."""

WITHOUT_ENGINE = ("core", "config", "tiers", "upstream")
"""Parts that must be importable with neither an engine nor PyTorch installed."""


@pytest.fixture(scope="module")
def imports() -> list[Import]:
    return scan(Path(hybrid_plugin.__file__).parent)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.package)
def test_packages_keep_their_boundaries(imports: list[Import], rule: Rule) -> None:
    assert any(is_below(found.importer, rule.package) for found in imports)
    assert rule.breaches(imports, PROJECT) == []


@pytest.fixture(scope="module")
def model_imports() -> list[Import]:
    return scan(Path(hybrid_models.__file__).parent)


@pytest.mark.parametrize("rule", MODEL_RULES, ids=lambda rule: rule.package)
def test_model_classes_keep_their_boundaries(
    model_imports: list[Import], rule: Rule
) -> None:
    assert any(is_below(found.importer, rule.package) for found in model_imports)
    assert rule.breaches(model_imports, MODELS) == []


def test_the_plugin_needs_no_model_classes(imports: list[Import]) -> None:
    named = [str(found) for found in imports if is_below(found.imported, MODELS)]
    assert named == [], "the command that lists them names their modules in strings"


def test_no_model_module_imports_itself_by_way_of_others(
    model_imports: list[Import],
) -> None:
    assert circles(model_imports, (When.LOAD,)) == []
    assert circles(model_imports, (When.LOAD, When.TYPING)) == [], "for type checkers"


def test_the_catalogue_needs_no_pytorch() -> None:
    absent = dict.fromkeys((*ENGINES, "torch", "triton", "transformers"))
    program = (
        f"import sys; sys.modules.update({absent!r})\nimport hybrid_models.catalogue\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_only_the_entry_point_imports_the_cpu_platform(imports: list[Import]) -> None:
    package = f"{PROJECT}.sglang_cpu"
    assert [
        str(found)
        for found in imports
        if is_below(found.imported, package) and not is_below(found.importer, package)
    ] == []


def test_the_cpu_platform_takes_little_from_the_adapter(imports: list[Import]) -> None:
    taken = {
        found.imported
        for found in imports
        if is_below(found.importer, f"{PROJECT}.sglang_cpu")
        and is_below(found.imported, f"{PROJECT}.sglang")
    }
    assert taken == CPU_FROM_SGLANG


def test_no_module_imports_itself_by_way_of_others(imports: list[Import]) -> None:
    assert circles(imports, (When.LOAD,)) == []
    assert circles(imports, (When.LOAD, When.TYPING)) == [], "for type checkers"


@pytest.mark.parametrize("part", WITHOUT_ENGINE)
def test_is_importable_without_an_engine(imports: list[Import], part: str) -> None:
    package = f"{PROJECT}.{part}"
    modules = sorted({f.importer for f in imports if is_below(f.importer, package)})
    assert modules
    absent = dict.fromkeys((*ENGINES, "torch", "triton", "transformers"))
    program = (
        f"import importlib, sys; sys.modules.update({absent!r})\n"
        f"for module in {modules!r}: importlib.import_module(module)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr


# ------------------------------------------------ the reader, on a made-up package


@pytest.fixture
def made_up(tmp_path: Path) -> list[Import]:
    """A package with one import of each kind, and circles of each kind."""
    files = {
        "made/__init__.py": "",
        "made/core/__init__.py": "from .tree import Tree\n",
        "made/core/tree.py": "import json\nfrom made.device import arena\n",
        "made/core/late.py": (
            "def function() -> None:\n    if True:\n        import torch.cuda\n"
        ),
        "made/core/typed.py": (
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n"
            "    from made.device.arena import Arena\nelse:\n    import other\n"
        ),
        "made/device/__init__.py": "",
        "made/device/arena.py": "from made.core import typed\nfrom ..corelike import x",
        "made/corelike.py": "try:\n    from made import missing\nexcept E:\n    pass\n",
    }
    for name, text in files.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return scan(tmp_path / "made")


def test_reads_every_kind_of_import(made_up: list[Import]) -> None:
    assert {(f.importer, f.imported, f.when, f.line) for f in made_up} == {
        ("made.core", "made.core.tree", When.LOAD, 1),
        ("made.core.tree", "json", When.LOAD, 1),
        ("made.core.tree", "made.device.arena", When.LOAD, 2),
        ("made.core.late", "torch.cuda", When.CALL, 3),
        ("made.core.typed", "typing", When.LOAD, 1),
        ("made.core.typed", "made.device.arena", When.TYPING, 3),
        ("made.core.typed", "other", When.LOAD, 5),
        ("made.device.arena", "made.core.typed", When.LOAD, 1),
        ("made.device.arena", "made.corelike", When.LOAD, 2),
        ("made.corelike", "made", When.LOAD, 2),
    }


def test_a_forbidden_import_is_found_wherever_it_is(made_up: list[Import]) -> None:
    rule = Rule("made.core", allowed=("made.core",), forbidden=("torch",))
    assert rule.breaches(made_up, "made") == [
        "made.core.late:3 imports torch.cuda",
        "made.core.tree:2 imports made.device.arena",
        "made.core.typed:3 imports made.device.arena",
    ]


def test_an_allowed_import_is_none(made_up: list[Import]) -> None:
    rule = Rule("made.device", allowed=("made.core", "made.corelike"))
    assert rule.breaches(made_up, "made") == []
    assert Rule("made.device", allowed=("made.core",)).breaches(made_up, "made") == [
        "made.device.arena:2 imports made.corelike"
    ]


def test_finds_circles(made_up: list[Import]) -> None:
    assert circles(made_up, (When.LOAD,)) == []
    assert circles(made_up, (When.LOAD, When.TYPING)) == [
        ("made.core.typed", "made.device.arena")
    ]
    back = Import("made.corelike", "made.core.tree", When.LOAD, 1)
    assert circles([*made_up, back], (When.LOAD,)) == [
        ("made.core.tree", "made.corelike", "made.device.arena")
    ]
