# SPDX-License-Identifier: Apache-2.0
"""The runner of upstream's tests, on an engine of two functions."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import checkout
import expectations
import pytest
import run_upstream
import yaml
from expectations import ExpectationsError, Expected

TESTS = """
import things

def test_make():
    assert things.make(2) == ("{made}", 2)

class TestCases:
    import pytest
    @pytest.mark.parametrize("number", [1, 2])
    def test_number(self, number):
        assert things.make(number)[1] == number

def test_it_is_stock():
    assert things.make(1)[0] == "stock"

def test_of_the_hub():
    raise ConnectionError
"""

MODULES = {
    "things.py": "def make(number):\n    return ('stock', number)\n",
    "ours.py": """
LOADED = []

def register():
    LOADED.append(1)

def make(number):
    return ("ours" if LOADED else "not loaded", number)
""",
}

LISTED: dict[str, Any] = {
    "test_make": "pass",
    "TestCases::test_number": "pass",
    "test_it_is_stock": {"fail": "ours says so."},
    "test_of_the_hub": {"not applicable": "it wants the network."},
}

FILE = "tests/test_things.py"

Run = Callable[..., int]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the fake checkout's tests; returns the exit status."""
    (tmp_path / "modules").mkdir()
    for name, text in MODULES.items():
        (tmp_path / "modules" / name).write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))

    def run(
        *flags: str, listed: dict[str, Any] = LISTED, made: str = "ours", **changes: Any
    ) -> int:
        file = tmp_path / "checkout" / FILE
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(TESTS.replace("{made}", made))
        content = {
            "engine": "things",
            "version": "1.0",
            "commit": "abc123",
            "load": "ours:register",
            "replace": {"things:make": "ours:make"},
            "models": {"some/model": {"model_type": "none"}},
            "blobs": {FILE: checkout.blob_of(file)},
            "tests": {FILE: listed},
        }
        (tmp_path / "things.yaml").write_text(yaml.safe_dump({**content, **changes}))
        where = [f"--upstream-checkout={tmp_path / 'checkout'}"]
        where += [f"--expectations={tmp_path / 'things.yaml'}"]
        return run_upstream.main([*where, *flags])

    return run


def test_each_goes_as_expected(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("-ra") == 0
    out = capfd.readouterr().out
    assert "3 passed, 1 skipped, 1 xfailed" in out
    assert "it wants the network." in out
    assert "ours says so." in out


def test_without_the_plugin(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("--stock", made="stock") == 0
    assert "4 passed, 1 skipped" in capfd.readouterr().out


def test_only_the_tests_are_laid_out(tmp_path: Path) -> None:
    expected = SimpleNamespace(tests={"test/unit/a.py": {}, "test/b.py": {}})
    (tmp_path / "engine" / "test").mkdir(parents=True)
    (tmp_path / "engine" / "python").mkdir()
    stage = run_upstream._stage(tmp_path / "engine", expected, tmp_path)
    assert [entry.name for entry in stage.iterdir()] == ["test"]
    assert (stage / "test").resolve() == tmp_path / "engine" / "test"


def test_one_test_alone(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(f"{FILE}::TestCases::test_number[2]") == 0
    assert "1 passed" in capfd.readouterr().out


def test_failure_is_a_failure(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(made="stock") == 1
    assert "1 failed" in capfd.readouterr().out


def test_expected_failure_that_passes(
    run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    listed = {**LISTED, "test_make": {"fail": "it is thought to."}}
    assert run(listed=listed) == 1
    assert "[XPASS(strict)] it is thought to." in capfd.readouterr().out


def test_what_is_said_of_a_case_goes_first(
    run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    case = {"TestCases::test_number[2]": {"not applicable": "two is too many."}}
    assert run(listed={**LISTED, **case}) == 0
    assert "2 passed, 2 skipped, 1 xfailed" in capfd.readouterr().out


def test_unlisted_test_is_named(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    listed = {name: said for name, said in LISTED.items() if name != "test_make"}
    assert run(listed=listed) == pytest.ExitCode.USAGE_ERROR
    message = f"Nothing is expected of {FILE}::test_make: see how it goes, and say so"
    assert message in capfd.readouterr().err


def test_listed_test_that_is_gone(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    listed = {**LISTED, "test_of_old": "pass"}
    assert run(listed=listed) == pytest.ExitCode.USAGE_ERROR
    assert f"There is no test {FILE}::test_of_old: take it" in capfd.readouterr().err


def test_another_commit(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(blobs={FILE: "0" * 40}) == 2
    error = capfd.readouterr().err
    assert error == f"{FILE} is of another commit: check out abc123.\n"
    gone = {"tests/test_gone.py": "0" * 40}
    assert run(blobs=gone, tests={"tests/test_gone.py": {}}) == 2
    assert "test_gone.py is not there: check out abc123." in capfd.readouterr().err


def test_no_list_for_what_is_installed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = f"--upstream-checkout={tmp_path}"
    assert run_upstream.main([where], lists=tmp_path) == 2
    assert "No list of tests is for the engine" in capsys.readouterr().err


def test_list_is_found_by_what_is_installed(tmp_path: Path) -> None:
    version = pytest.__version__
    for engine, number in (("pytest", "0.1"), ("pytest", version), ("nobodys", "1")):
        content = f"engine: {engine}\nversion: '{number}'\ncommit: a\nload: a:b\n"
        content += "replace: {}\nmodels: {}\nblobs: {}\ntests: {}\n"
        (tmp_path / f"{engine}-{number}.yaml").write_text(content)
    found = run_upstream._for_installed(tmp_path)
    assert found is not None
    assert found.name == f"pytest-{version}.yaml"


def test_blob_is_gits(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"hello\n")  # the example of Git's own book
    blob = checkout.blob_of(tmp_path / "file")
    assert blob == "ce013625030ba8dba906f756967f9e9ca394464a"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("tests: {a.py: {test_a: maybe}}", "test_a must say pass, or another outcome"),
        ("tests: {a.py: {test_a: {fail: ''}}}", "test_a must say pass, or another"),
        ("tests: {a.py: {test_a: {pass: yes}}}", "test_a must say pass, or another"),
        ("tests: {a.py: {test_a: {maybe: so}}}", "'maybe' is not a valid Expected"),
        ("tests: {b.py: {}}", "blobs and tests name different files"),
        ("colour: red\ntests: {a.py: {}}", "unexpected keyword argument 'colour'"),
        ("", "'tests'"),
    ],
)
def test_wrong_list(tmp_path: Path, change: str, problem: str) -> None:
    text = "engine: e\nversion: '1'\ncommit: a\nload: a:b\nreplace: {}\nmodels: {}\n"
    (tmp_path / "list.yaml").write_text(f"{text}blobs: {{a.py: '0'}}\n{change}\n")
    with pytest.raises(ExpectationsError) as refusal:
        expectations.load(tmp_path / "list.yaml")
    assert str(refusal.value).startswith("list.yaml is wrong: ")
    assert problem in str(refusal.value)


@pytest.mark.parametrize(
    "file", sorted(run_upstream.HERE.glob("*.yaml")), ids=lambda file: file.stem
)
def test_our_lists(file: Path) -> None:
    expected = expectations.load(file)
    assert file.stem == f"{expected.engine}-{expected.version}"
    listed = [e for tests in expected.tests.values() for e in tests.values()]
    assert any(e.outcome is Expected.PASS for e in listed)
    for e in listed:
        assert e.outcome is Expected.PASS or e.because.endswith(".")
    assert all(len(blob) == 40 for blob in expected.blobs.values())
    for ours in (expected.load, *expected.replace.values()):
        module = ours.partition(":")[0].replace(".", os.sep)
        places = (run_upstream.HERE, run_upstream.HERE.parents[1])
        assert any(
            (place / f"{module}.py").exists() or (place / module).is_dir()
            for place in places
        ), ours
