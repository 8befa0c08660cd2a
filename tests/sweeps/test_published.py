"""Published accept lengths beside measured ones, and the grid of the documentation on stand-ins."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from specbatch.cli.app import app
from specbatch.errors import SpecbatchError
from specbatch.sweeps.published import published_table
from specbatch.sweeps.run.configurations import read_grid
from tests.kit.swept import saved, swept

GRIDS = Path(__file__).parents[2] / "docs" / "grids"


def cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]


def test_table_has_a_value_or_a_reason_in_each_line(tmp_path: Path) -> None:
    records = [swept("eagle3", repeat=repeat) for repeat in (1, 2)]
    saved(tmp_path / "gsm8k", *records, swept("dflash", simulate=3.0))
    (tmp_path / "table.csv").write_text(
        "dataset,configuration,accept_length\ngsm8k,eagle3,2.5\ngsm8k,dflash,5.33\ngsm8k,mtp,3\ngsm8k,magic,6.17\nmath,eagle3,4\n"
    )
    rows = [row for record in records for row in record.requests]
    wanted = sum(row["emitted"] for row in rows) / sum(row["verify_steps"] for row in rows)
    first, simulated, missing, unknown, unrun = cells(published_table(tmp_path / "table.csv", tmp_path))
    assert first[:4] == ["gsm8k", "eagle3", "2.50", f"{wanted:.2f}"]
    low, high = map(float, first[4].split(" to "))
    assert low < wanted < high < wanted + 0.5
    assert first[6] == str(len(rows))
    assert simulated[3:5] == ["-", "not measured: simulated acceptance (geometric, mean 3)"]
    assert missing[4] == "not measured: not in the sweep, or failed"
    assert unknown[4] == missing[4]
    assert unrun[4] == f"not measured: no {tmp_path / 'math'}"


def test_table_without_its_columns_is_refused(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text("dataset,accept_length\ngsm8k,2\n")
    with pytest.raises(SpecbatchError, match="write a CSV file with the columns dataset, configuration, accept_length"):
        published_table(tmp_path / "table.csv", tmp_path)


@pytest.mark.parametrize("name", ["dspark-table1", "qwen2.5-coder-1.5b", "qwen2.5-coder-1.5b-drafts"])
def test_grids_of_the_documentation_have_options_of_an_engine(name: str) -> None:
    from specbatch.cli.configs import configured
    from specbatch.cli.options import EngineOptions

    path = GRIDS / f"{name}.toml"
    assert list(configured(EngineOptions(device="cpu"), str(path))) == list(read_grid(path))


@pytest.mark.slow
def test_grid_runs_on_stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of docs/published-tables.md with random weights and heads."""
    text = (GRIDS / "dspark-table1.toml").read_text()
    text = re.sub(r"deepseek-ai/\w+", "dummy", text)
    (tmp_path / "grid.toml").write_text(text)
    (tmp_path / "rows.jsonl").write_text('{"turns": ["One?", "Two?"]}\n{"turns": ["Three?"]}\n')
    words: list[Any] = ["sweep", "--model", "toy", "--load-format", "dummy", "--device", "cpu", "--dataset"]
    words += [tmp_path / "rows.jsonl", "--configs", tmp_path / "grid.toml", "--turns", 1, "--temperature", 1]
    words += ["--no-chat-template", "--output-len", 12, "--concurrency", 4, "--prompts-per-concurrency", 3]
    done = CliRunner().invoke(app, [str(word) for word in (*words, "--out", tmp_path / "out" / "gsm8k")])
    assert done.exit_code == 0, done.output
    found = cells(published_table(GRIDS / "dspark-table1.csv", tmp_path / "out"))
    measured = {row[1]: row for row in found if row[0] == "gsm8k"}
    assert all(float(measured[name][3]) >= 1 for name in ("eagle3", "dflash", "dspark"))
