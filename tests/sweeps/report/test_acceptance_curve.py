"""The curve of runs: counts of all of them together, files that --simulate-accept reads, and what cannot be pooled."""

from __future__ import annotations

import json
from itertools import accumulate
from operator import mul
from pathlib import Path

import pytest
import yaml
from swept import saved, swept
from typer.testing import CliRunner

from specbatch.cli.app import app
from specbatch.config.acceptance_profile import read_profile
from specbatch.errors import SpecbatchError
from specbatch.sweeps.report.acceptance_curve import curve_of


def test_curve_counts_all_runs_together(tmp_path: Path) -> None:
    records = [swept("baseline"), swept("v1"), swept("v2", 9, 2)]
    curve = curve_of([saved(tmp_path, *records)])
    counts = [record.counters["acceptance"] for record in records[1:]]
    assert curve.tried == [sum(both) for both in zip(*(count["tried"] for count in counts), strict=True)]
    shares = [right / tried for right, tried in zip(curve.accepted, curve.tried, strict=True)]
    assert curve.profile.conditional == pytest.approx(shares)
    lengths = dict(enumerate(accumulate(accumulate(shares, mul), initial=1.0)))
    assert curve.accept_lengths == pytest.approx({count: lengths[count] for count in curve.accept_lengths})
    assert curve.name == "smollm2-135m, ngram, random"
    assert curve.runs == [str(tmp_path / "v1/c4/r1"), str(tmp_path / "v2/c9/r2")]
    assert curve_of([tmp_path / "v1", tmp_path / "v2"]) == curve
    assert curve_of([tmp_path, tmp_path / "v1"]) == curve, "each run counts once"


@pytest.mark.parametrize("file", ["curve.json", "curve.yaml"])
def test_command_writes_what_simulate_accept_reads(tmp_path: Path, file: str) -> None:
    folder = saved(tmp_path / "sweep", swept("v1", thinking=True))
    result = CliRunner().invoke(app, ["acceptance", str(folder), "--json", "--output", str(tmp_path / file)])
    assert result.exit_code == 0, result.output
    shown = json.loads(result.stdout)
    profile = read_profile(str(tmp_path / file))
    assert profile.conditional == pytest.approx(shown["conditional"], abs=1e-3)
    assert profile.conditional == pytest.approx(curve_of([folder]).profile.conditional, abs=1e-3)
    if file == "curve.json":
        assert json.loads((tmp_path / file).read_text()) == shown
        assert profile.name == "smollm2-135m, ngram, random, thinking on"
    else:
        (model,) = yaml.safe_load((tmp_path / file).read_text()).items()
        lengths = {int(count): length for count, length in shown["accept_length"].items()}
        assert model == ("smollm2-135m", {"thinking_on": pytest.approx(lengths, abs=1e-6)})
    table = CliRunner().invoke(app, ["acceptance", str(folder)], env={"COLUMNS": "1000"}).stdout
    assert f"| 1       | {shown['tried'][0]}" in table


def test_drafts_that_were_never_tried_are_named(tmp_path: Path) -> None:
    record = swept("v1")
    for accepted, use in ((1, "simulate at most 2 drafts."), (0, "a simulation accepts none of them.")):
        counts = {"drafted": [8, 8, 2, 2], "tried": [8, 4, 0, 0], "accepted": [4, accepted, 0, 0]}
        record.counters["acceptance"] |= counts
        curve = curve_of([saved(tmp_path / str(accepted), record)])
        assert f" Drafts 3 to 4 were never tried: {use}" in curve.markdown()
    record.counters["acceptance"] |= {name: [0, 0] for name in ("drafted", "tried", "accepted")}
    with pytest.raises(SpecbatchError, match="no run there used speculation"):
        curve_of([saved(tmp_path / "none", record)])


def test_runs_that_cannot_be_counted_together_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path, swept("v1"), swept("v2", simulate=2.4), swept("baseline"))
    with pytest.raises(SpecbatchError, match=r"differ: smollm2-135m, ngram, random; .*simulated: geometric, mean 2\.4"):
        curve_of([folder])
    with pytest.raises(SpecbatchError, match="no run there used speculation; name runs that did"):
        curve_of([folder / "baseline"])
    for wrong in ("curve.txt", "curve"):
        result = CliRunner().invoke(app, ["acceptance", str(folder / "v1"), "--output", str(tmp_path / wrong)])
        assert (result.exit_code, "name a .json or .yaml file" in result.output) == (2, True)


@pytest.mark.parametrize("file", ["curve.json", "curve.yaml"])
@pytest.mark.parametrize("content", ["mine", "{}", '{"mine": 1}', ""])
def test_other_files_are_not_replaced(tmp_path: Path, file: str, content: str) -> None:
    curve = curve_of([saved(tmp_path / "sweep", swept("v1"))])
    (tmp_path / file).write_text(content)
    with pytest.raises(SpecbatchError, match="already exists and is no curve; name another file"):
        curve.save(tmp_path / file)
    assert (tmp_path / file).read_text() == content
    (tmp_path / file).unlink()
    for _ in range(2):
        curve.save(tmp_path / file)
