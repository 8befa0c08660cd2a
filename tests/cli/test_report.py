"""`specbatch report`: tables, charts and an HTML page from the records of a sweep."""

from __future__ import annotations

import json

from swept import saved, swept

from specbatch.records.archive import pack

from .conftest import TINY_SWEEP


def test_a_sweep_and_its_report(run, tmp_path, request):
    run("sweep", "--concurrency", "1", "--configs", "baseline,v2", "--output", tmp_path / "out", *TINY_SWEEP)
    before = (tmp_path / "out/summary.md").read_text()
    result = run("report", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == str(tmp_path / "out/report.html")
    assert (tmp_path / "out/summary.md").read_text() == before
    assert "smollm2-135m" in (tmp_path / "out/report.html").read_text()
    assert (tmp_path / "out/plots/ttft.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "out/plots/steps.png").exists()  # the stub counts no steps

    request.getfixturevalue("no_plots")  # which take most of the time
    (line,) = run("report", tmp_path / "out", "--output", tmp_path / "new", "--json").stdout.splitlines()
    found = json.loads(line)
    assert found["report"] == str(tmp_path / "new/report.html")
    assert set(found["files"]) == {str(path) for path in (tmp_path / "new").rglob("*") if path.is_file()}


def test_pivots_of_an_archive_of_several_sweeps(run, tmp_path):
    for rate in (1.0, 5.0):
        folder = saved(tmp_path / f"out/request-rate-{rate:g}", swept("v2", request_rate=rate))
        plan = {"configurations": {"v2": {}}, "concurrency": [4], "repeats": 1}
        (folder / "sweep.json").write_text(json.dumps(plan))
    pack(tmp_path / "out", tmp_path / "records.tar.xz")
    command = ("report", tmp_path / "records.tar.xz", "--pivot", "request_rate,configuration,accept-length")
    result = run(*command)
    assert (result.exit_code, "an archive is only read: name a folder" in result.stderr) == (2, True)
    result = run(*command, *command[2:], "--output", tmp_path / "new")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "new/pivots.md").read_text().count("###") == 1
