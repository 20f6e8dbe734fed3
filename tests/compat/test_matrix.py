# SPDX-License-Identifier: Apache-2.0
"""The matrix, and the page that is made out of it."""

from __future__ import annotations

from pathlib import Path

import matrix_sources
import pytest
import run_matrix

from hybrid_plugin.upstream import matrix
from hybrid_plugin.upstream.contracts import ENGINES, contracts_of
from hybrid_plugin.upstream.matrix import MatrixError, Status
from tests.compat.engines import KEPT, source_of

ROOT = Path(__file__).parents[2]

ROW = """
[[row]]
engine = "vllm"
version = "1.0"
distribution = "vllm"
platform = "cpu"
python = "3.12"
torch = "2.14"
"""


def _load(folder: Path, text: str) -> tuple[matrix.Row, ...]:
    file = folder / "matrix.toml"
    file.write_text(text)
    return matrix.load(file)


def test_rows_are_of_engines_we_have() -> None:
    rows = matrix.load()
    assert {row.engine for row in rows} == set(ENGINES)
    for row in rows:
        for test in row.tests:
            assert (ROOT / test).exists(), test
        if row.install is not None:
            assert (ROOT / row.install.script).exists()


@pytest.mark.parametrize("engine", ENGINES)
def test_contracts_have_names_of_their_own(engine: str) -> None:
    contracts = contracts_of(engine)
    assert len(contracts) > 50
    assert all(":" in contract.target for contract in contracts)


@pytest.mark.parametrize(
    ("addition", "problem"),
    [
        ('status = "maybe"', "'maybe' is not a valid Status"),
        ('status = "refused"\ncolour = "red"', "unexpected keyword argument 'colour'"),
        ('status = "served"', "`served` needs `tests` and `tested`"),
        (
            'status = "served"\ntests = ["tests"]\ntested = "ci"',
            "what is tested in CI needs `install`",
        ),
        ('status = "contracts"\ntests = ["tests"]\ntested = "gpu"', "nothing else has"),
        ("", "'status'"),
    ],
)
def test_wrong_rows_are_named(tmp_path: Path, addition: str, problem: str) -> None:
    with pytest.raises(MatrixError) as refusal:
        _load(tmp_path, ROW + addition)
    assert str(refusal.value).startswith("The row vllm-1.0 is wrong: ")
    assert problem in str(refusal.value)


def test_a_row_is_there_once(tmp_path: Path) -> None:
    with pytest.raises(MatrixError, match=r"vllm-1\.0 is there twice"):
        _load(tmp_path, 2 * (ROW + 'status = "refused"\n'))


def test_newest_is_by_number(tmp_path: Path) -> None:
    served = 'status = "served"\ntested = "gpu"\ntests = ["tests"]\n'
    older = ROW.replace('"1.0"', '"0.9"')
    newer = ROW.replace('"1.0"', '"0.10"')
    refused = ROW + 'status = "refused"\n'
    rows = _load(tmp_path, older + served + newer + served + refused)
    assert matrix.newest(rows, "vllm").version == "0.10"
    with pytest.raises(MatrixError, match="No version of sglang is served"):
        matrix.newest(rows, "sglang")


def test_page_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    if any(source_of(row) is None for row in matrix.load()):
        pytest.skip("run ci/run_matrix.py --contracts-only: it fetches the wheels")
    arguments = ["--all", "--contracts-only", "--compare", f"--sources={KEPT}"]
    status = run_matrix.main([*arguments, "--offline"])
    assert status == 0, capsys.readouterr().out


def test_refused_row_whose_contracts_hold_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = _load(tmp_path, ROW + 'status = "refused"\n')
    monkeypatch.setattr(matrix, "load", lambda: rows)
    monkeypatch.setattr(run_matrix.contracts, "check_source", lambda *_: [])
    status = run_matrix.main(["--contracts-only", f"--source={tmp_path}"])
    assert status == 1
    assert "vllm-1.0 is refused in the matrix, yet" in capsys.readouterr().out


def test_source_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (row,) = _load(tmp_path, ROW + 'status = "refused"\n')
    with pytest.raises(matrix_sources.SourceError, match="neither installed nor in"):
        matrix_sources.find(row, tmp_path, offline=True)
    monkeypatch.setattr(matrix, "load", lambda: (row,))
    offline = run_matrix.main(
        ["--contracts-only", f"--sources={tmp_path}", "--offline"]
    )
    assert offline == 0
    assert "left out: vllm-1.0" in capsys.readouterr().out
    monkeypatch.setattr(matrix_sources, "_pip", lambda: ["false"])
    assert run_matrix.main(["--contracts-only", f"--sources={tmp_path}"]) == 1
    assert "vllm==1.0 could not be downloaded" in capsys.readouterr().out


def test_unknown_version() -> None:
    assert run_matrix.main(["--engine=vllm", "--version=9.9"]) == 1


def test_statuses_are_explained() -> None:
    text = (ROOT / "ci" / "matrix.toml").read_text()
    for status in Status:
        assert f"{status.value}  " in text
