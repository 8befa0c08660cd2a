"""Records, rows and plans edited by hand: `compare`, `gate` and `report` read them or refuse them in one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from random import Random

import pytest
from fuzzing import Fuzz
from made_runs import make_report
from mutate import mutate_json_text
from swept import saved, swept
from typer.testing import CliRunner

from specbatch.cli.app import app

GATE = "[bounds]\noutput_throughput = { at_least = 1 }\naccept_length = { worsens_at_most = 0.5 }\n"
ACCURACY = '[accuracy]\nfilter = "loose"\n'


@pytest.fixture(scope="module")
def sweep_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two configurations with two repeats, and a plan."""
    folder = tmp_path_factory.mktemp("sweep")
    saved(folder, *(swept(name, 2, repeat) for name in ("baseline", "v1") for repeat in (1, 2)))
    plan = {"configurations": {"baseline": {}, "v1": {}}, "concurrency": [2], "repeats": 2}
    (folder / "sweep.json").write_text(json.dumps(plan))
    return folder


@pytest.fixture(scope="module")
def eval_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eval")
    make_report("110101").save(folder)
    return folder


def mutate_file(random: Random, folder: Path) -> None:
    """Change a file, or a line of a JSONL file."""
    path = random.choice(sorted([*folder.rglob("*.json"), *folder.rglob("*.jsonl")]))
    content = path.read_bytes()
    if path.suffix == ".json":
        path.write_bytes(mutate_json_text(random, content))
        return
    lines = content.split(b"\n")
    place = random.randrange(max(1, len(lines) - 1))
    lines[place] = mutate_json_text(random, lines[place] or b"{}")
    path.write_bytes(b"\n".join(lines))


def mutated(random: Random, source: Path, target: Path) -> Path:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    mutate_file(random, target)
    return target


def invoke(fuzz: Fuzz, *words: object) -> None:
    """Run a command: exit status 0 or 1 with a result, or 2 with one line."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    if not isinstance(result.exception, (SystemExit, type(None))):
        raise result.exception
    assert result.exit_code in (0, 1, 2), result.output
    if result.exit_code == 2:
        assert result.stderr.startswith("error: ")
        assert result.stderr.count("\n") == 1, result.stderr
        assert len(result.stderr) < 2_000, result.stderr
    fuzz.outcome(("accepted", "accepted, status 1", "refused")[result.exit_code])


def test_compare(fuzz: Fuzz, sweep_folder: Path, eval_folder: Path, tmp_path: Path) -> None:
    for random in fuzz.rounds(quick=8):
        source = random.choice((sweep_folder / "v1", sweep_folder, eval_folder))
        invoke(fuzz, "compare", source, mutated(random, source, tmp_path / "changed"))


def test_gate(fuzz: Fuzz, sweep_folder: Path, eval_folder: Path, tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    for random in fuzz.rounds(quick=30):
        source, rules = random.choice(((sweep_folder, GATE), (eval_folder, GATE + ACCURACY)))
        policy.write_text(rules)
        runs = [source, mutated(random, source, tmp_path / "changed")]
        random.shuffle(runs)
        invoke(fuzz, "gate", runs[0], "--baseline", runs[1], "--policy", policy)


def test_report(fuzz: Fuzz, sweep_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plots are drawn; saving them, which takes seconds, is left out."""
    from specbatch.sweeps.report import plot_style

    monkeypatch.setattr(plot_style, "svg", lambda figure, name: "<svg></svg>")
    monkeypatch.setattr(plot_style, "png", lambda figure: b"")
    for random in fuzz.rounds(quick=3):
        invoke(fuzz, "report", mutated(random, sweep_folder, tmp_path / "changed"))
