"""One table of sweeps that differ in one thing: what it is follows from their plans; changes are prompt by prompt."""

from __future__ import annotations

import csv
import importlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_runs import make_record, metrics_of

from specbatch.config.engine_config import EngineConfig
from specbatch.config.speculation import Speculation
from specbatch.records.archive import pack
from specbatch.records.run_record import RunRecord
from specbatch.records.sweep_plan import PLAN, Point
from specbatch.sweeps.report.parts import EVERY_POINT, load_parts, part_files, write_parts

PROMPTS = 12


def record(name: str, repeat: int, speed: float, accept: Callable[[int], int], place: int) -> RunRecord:
    """A point whose prompts have 10 verifies each, which emitted `accept(index)` tokens."""
    drafts = name != "baseline"
    rows = [metrics_of(emitted=accept(index) if drafts else 10) for index in range(PROMPTS)]
    speculation = Speculation("ngram", "v2") if drafts else Speculation()
    made = make_record(
        rows, configuration=name, concurrency=2, repeat=repeat, config=EngineConfig(speculation=speculation),
        created=f"2030-01-01T00:00:{10 * repeat + (place if repeat % 2 else -place):02d}+00:00",
        input_len=8, ignore_eos=False, seed=0, output_sha256="same",
    )  # fmt: skip
    made.workload["place"] = place
    made.metrics["output_throughput"] = speed
    return made


def part(folder: Path, speeds: list[float], accept: Callable[[int], int], model: str = "toy", **work: Any) -> None:
    """A sweep of a baseline at 10 tok/s, and of ngram at one speed per repeat."""
    plan = {
        "configurations": {"baseline": {"model": model}, "ngram": {"model": model}}, "concurrency": [2],
        "repeats": len(speeds), "workload": {"input_len": 8, "thinking": None, "scramble": "none"} | work,
    }  # fmt: skip
    folder.mkdir(parents=True)
    (folder / PLAN).write_text(json.dumps(plan))
    for repeat, speed in enumerate(speeds, start=1):
        for place, (name, own) in enumerate((("baseline", 10.0), ("ngram", speed))):
            to = Point(name, place, 2, repeat).folder(folder)
            to.mkdir(parents=True)
            record(name, repeat, own, accept, place).save(to)


def lengths(folder: Path) -> None:
    """Acceptance falls with the context, by 2 and 3 of 10 tokens in turn, and the speed with it."""
    part(folder / "a", [20, 20.2, 19.9], lambda index: 20 + index, input_len=512)
    part(folder / "b", [15, 15.2, 14.9], lambda index: 18 + index - index % 2, input_len=1024)
    part(folder / "c", [9, 9.1, 8.9], lambda index: 10 + index, input_len=16384)


def test_axis_follows_from_the_plans_and_labels_are_sorted_by_value(tmp_path: Path) -> None:
    lengths(tmp_path)
    found = load_parts(tmp_path)
    assert found is not None
    assert (found.axis, [*found.folders]) == ("input_len", ["512", "1024", "16384"])
    for place, model in enumerate(("run/step-50", "run/step-0", "run/step-200")):
        part(tmp_path / f"models/{place}", [20], lambda index: 20, model)
    found = load_parts(tmp_path / "models")
    assert found is not None
    assert (found.axis, [*found.folders]) == ("model", ["step-0", "step-50", "step-200"])
    for kind in ("shuffled", "none", "random"):
        part(tmp_path / f"kinds/{kind}", [20], lambda index: 20, scramble=kind)
    assert [*load_parts(tmp_path / "kinds").folders] == ["none", "shuffled", "random"]  # type: ignore[union-attr]
    part(tmp_path / "alone/x", [20], lambda index: 20)
    assert load_parts(tmp_path / "alone") is None
    assert write_parts(tmp_path / "alone") == ("", [])


def test_table_has_changes_what_could_be_shown_and_where_speculation_pays(tmp_path: Path) -> None:
    lengths(tmp_path)
    text, rows = write_parts(tmp_path)
    assert (tmp_path / "summary.md").read_text() == text
    changes = list(csv.DictReader((tmp_path / "acceptance.csv").read_text().splitlines()))
    assert [row["input_len"] for row in changes] == ["512", "1024", "16384"]
    assert float(changes[0]["accept_length"]) == pytest.approx(2.55)
    assert changes[0]["change"] == ""
    assert float(changes[1]["change"]) == pytest.approx(-0.25)
    low, high = (float(changes[1][f"change_{end}"]) for end in ("low", "high"))
    assert low < -0.25 < high < -0.2, "pairs: prompts differ by far more"
    assert float(changes[1]["change_detectable"]) < 0.06
    assert (float(changes[2]["change"]), float(changes[2]["change_detectable"])) == (pytest.approx(-1), 0)
    assert "| ngram    | 2                    | pays 512-1024, loses 16384 |" in text
    least = [row["ratio_detectable"] for row in rows if row["configuration"] == "ngram"]
    assert all(0 < value < 0.06 for value in least)
    for name in ("context", "context-brief"):
        svg = (tmp_path / f"plots/{name}.svg").read_text()
        assert all(f">{label}<" in svg for label in ("512", "1k", "16k", "accept length", "speedup at 2 requests"))


def test_gain_that_tells_nothing_is_no_number(tmp_path: Path) -> None:
    lengths(tmp_path)
    part(tmp_path / "d", [1, 1000], lambda index: 20, input_len=2048)
    assert re.search(r"\| over 1000% +\|", write_parts(tmp_path)[0])


def test_verdict_does_not_reach_over_a_length_without_one(tmp_path: Path) -> None:
    lengths(tmp_path)
    part(tmp_path / "d", [15, 15.2, 14.9], lambda index: 20, input_len=2048)
    for path in (tmp_path / "b").glob("ngram/c2/r*/record.json"):
        path.unlink()
    text, _ = write_parts(tmp_path)
    assert "| pays 512, not measured 1024, pays 2048, loses 16384 |" in text


def test_brief_plot_has_one_concurrency(tmp_path: Path) -> None:
    lengths(tmp_path)
    found = load_parts(tmp_path)
    assert found is not None
    for records in found.records.values():
        records += [replace(one, workload=one.workload | {"concurrency": 4}) for one in records]
    files, _ = part_files(found)
    assert "speedup at 4 requests" in files["plots/context.svg"]
    assert "speedup at 4 requests" not in files["plots/context-brief.svg"]


@pytest.mark.usefixtures("no_plots")
def test_short_tables_have_a_column_for_each_part(tmp_path: Path) -> None:
    lengths(tmp_path)
    short, _, long = write_parts(tmp_path)[0].partition(EVERY_POINT)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in short.splitlines() if line.startswith("| 2 ")]
    assert [row[:2] for row in rows] == [["2", "ngram"], ["2", "ngram"]]
    assert [[cell.split(" (")[0] for cell in row[2:]] for row in rows] == [
        ["2.550", "2.300", "1.550"],
        ["2.00", "1.50", "0.90"],
    ]
    assert "detectable (80% power) in these tables: changes of accept lengths 0.000 to 0.046 and of speedups" in short
    assert short.index("Where speculation pays") > short.index("Speedup over")
    assert "Where speculation pays" not in long
    (tmp_path / "b").rename(tmp_path.parent / f"{tmp_path.name}-b")
    assert "Accept length by input tokens (95% interval)" not in write_parts(tmp_path)[0], "two parts"


def test_published_plots_are_remade_from_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "results")
    remake = importlib.import_module("remake")
    lengths(tmp_path / "runs")
    write_parts(tmp_path / "runs", tmp_path / "page")
    pack(tmp_path / "runs", tmp_path / "page/records.tar.xz")
    found = dict(remake.remade(tmp_path / "page/records.tar.xz"))
    plot = tmp_path / "page/plots/context.svg"
    assert plot.with_name("context-brief.svg") in found
    assert remake.is_same(plot.read_text(), found[plot])
    moved = re.sub(r'(<use [^>]*x="\d+)\.', lambda one: f"{one[1]}0.", found[plot], count=1)
    assert not remake.is_same(plot.read_text(), moved)


@pytest.mark.usefixtures("no_plots")
def test_unfinished_part_is_named(tmp_path: Path) -> None:
    lengths(tmp_path)
    next((tmp_path / "c").glob("ngram/c2/r3/record.json")).unlink()
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / PLAN).write_text((tmp_path / "c" / PLAN).read_text().replace("16384", "32768"))
    text = write_parts(tmp_path)[0]
    assert "* UNFINISHED: input tokens 16384 and 32768\n" in text
    assert "d/summary.md" not in text


def test_no_part_is_left_out(tmp_path: Path) -> None:
    for name, model in (("m-1", "old/m"), ("m-2", "new/m")):
        part(tmp_path / f"models/{name}", [20], lambda index: 20, model)
    found = load_parts(tmp_path / "models")
    assert found is not None
    assert (found.axis, [*found.folders]) == ("model", ["m-1", "m-2"])
    for name, size, seed in (("a", 512, 0), ("b", 512, 1), ("c", 1024, 0)):
        part(tmp_path / f"seeds/{name}", [20], lambda index: 20, input_len=size, seed=seed)
    assert load_parts(tmp_path / "seeds") is None, "a and b have the same length, and differ in something else"


@pytest.mark.usefixtures("no_plots")
def test_failures_are_named(tmp_path: Path) -> None:
    lengths(tmp_path)
    for path in (tmp_path / "c").glob("*/c2/r*/record.json"):
        made = json.loads(path.read_text())
        made["workload"]["error"] = "out of memory"
        path.write_text(json.dumps(made))
    text, _ = write_parts(tmp_path)
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| 16384 ") and "| 2 " in line]
    assert [(row[3].strip(), row[-3].strip()) for row in rows] == [("baseline", "failed"), ("ngram", "failed")]
    assert "* FAILED: input tokens 16384: ngram at concurrency 2, repeat 1, and 2 other points: out of memory\n" in text


@pytest.mark.usefixtures("no_plots")
def test_rounds_of_two_machines_are_named(tmp_path: Path) -> None:
    lengths(tmp_path)
    assert "OTHER MACHINE" not in write_parts(tmp_path)[0]
    path = tmp_path / "b/ngram/c2/r2/record.json"
    made = json.loads(path.read_text())
    path.write_text(json.dumps(made | {"hardware": {"cpu": "slide rule", "cores": 2}}))
    note = "* OTHER MACHINE: input tokens 1024: ratios at concurrency 2, repeat 2, compare machines, too: "
    assert f"{note}baseline with cpu abacus; ngram with cpu slide rule; delete the points" in write_parts(tmp_path)[0]


@pytest.mark.usefixtures("no_plots")
def test_what_was_simulated_is_said_below_the_common_table(tmp_path: Path) -> None:
    lengths(tmp_path)
    assert "SIMULATED" not in write_parts(tmp_path)[0]
    for path in tmp_path.glob("*/ngram/c2/r*/record.json"):
        made = json.loads(path.read_text())
        made["config"]["speculation"]["simulate_accept_length"] = 2.4
        path.write_text(json.dumps(made))
    drawn = "* SIMULATED: ngram: acceptance was drawn at random (geometric, mean 2.4)"
    assert write_parts(tmp_path)[0].count(drawn) == 1
