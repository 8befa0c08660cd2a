"""`sweep`, `report` and `compare` have the same verdict and the same interval for the same folder."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from swept import saved, swept

from specbatch.records.verdicts import LOSES, ONE_REPEAT, PAYS, UNDECIDED
from specbatch.sweeps.report.compare import compare
from specbatch.sweeps.report.points import load_records
from specbatch.sweeps.report.report import table_files
from specbatch.sweeps.report.sentences import headline
from specbatch.sweeps.report.tables import as_json, markdown, table

SPEED = "output_throughput"


def sweep_of(folder: Path, factor: float, repeats: int) -> Path:
    """A sweep at one concurrency in which v1 is `factor` times as fast as the baseline, on a machine that drifts."""
    draw, records = random.Random(7), []
    for repeat in range(1, repeats + 1):
        drift = 100 + 20 * repeat
        for name, speed in (("baseline", 1.0), ("v1", factor), ("v2", 1.0)):
            made = swept(name, repeat=repeat)
            made.metrics |= {SPEED: drift * speed * draw.uniform(0.99, 1.01)}
            records.append(made)
    return saved(folder, *records)


@pytest.mark.parametrize(
    ("factor", "repeats", "verdict"),
    [(1.3, 3, PAYS), (0.7, 3, LOSES), (1.001, 3, UNDECIDED), (1.3, 1, ONE_REPEAT)],
)
def test_sweep_report_and_compare_agree(tmp_path: Path, factor: float, repeats: int, verdict: str) -> None:
    folder = sweep_of(tmp_path / "out", factor, repeats)
    records = load_records(folder)
    (row,) = (row for row in as_json(table(records)) if row["configuration"] == "v1")
    assert row["ratio_verdict"] == verdict
    cells = [line.split("|") for line in markdown(records, table(records)).splitlines() if line.startswith("| ")]
    assert {row[-2].strip() for row in cells if row[2].strip() == "v1"} >= {verdict}
    (found,) = (one for one in compare(folder / "baseline", folder / "v1").rows if one.metric == SPEED)
    assert found.verdict == verdict
    assert found.before is not None
    assert found.after is not None
    assert row["ratio"] == pytest.approx(found.after / found.before, rel=1e-3), "geometric and other means are near"
    assert [row["ratio"], row["ratio_low"], row["ratio_high"]] == [found.ratio, found.ratio_low, found.ratio_high]
    (shown,) = (
        row for row in json.loads(table_files(records, [])["summary.json"])["rows"] if row["configuration"] == "v1"
    )
    assert shown == row
    assert ("v1 generates 1.3" in headline(records)) == (factor > 1.1)
