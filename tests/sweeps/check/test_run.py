"""`specbatch check`: equal output, divergences with their place and the referee's gaps, the record, and the command."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_faults import every_draft_accepted
from stand_ins import fake_graphs
from typer.testing import CliRunner, Result

from specbatch import EngineConfig, SpecbatchError, Speculation
from specbatch.cli.app import app
from specbatch.config.engine_config import Graphs
from specbatch.core.completion import Completion, RequestMetrics
from specbatch.records.store import load_record
from specbatch.sweeps.check.options import CheckOptions
from specbatch.sweeps.check.prompts import random_prompts
from specbatch.sweeps.check.report import Answer, CheckReport, Finding
from specbatch.sweeps.check.run import _compare, run_check
from specbatch.sweeps.check.verdict import Places
from specbatch.sweeps.run.loading import load_engine

SPECULATIONS = {
    "none": Speculation(),
    "ngram": Speculation("ngram", draft_tokens=3, ngram_min=1),
    "self": Speculation("standalone", draft="self:skip=1"),
    "other": Speculation("standalone", draft="toy-2", draft_tokens=2),
}


COUNT, TOKENS = 6, 15


@pytest.fixture
def check(toy: Any, open_toy: Any, tmp_path: Path, use_checkpoints: Any) -> Callable[..., CheckReport]:
    """`check(speculation, graphs, **settings of CheckOptions)` over the toy model and, by default, its prompts."""
    use_checkpoints(open_toy)
    source = tmp_path / "in.jsonl"
    prompts = toy.prompts()[:COUNT]
    source.write_text(
        "".join(json.dumps({"prompt_token_ids": prompt, "id": f"p{i}"}) + "\n" for i, prompt in enumerate(prompts))
    )

    def call(speculation: Speculation, graphs: Graphs | None = None, **options: Any) -> CheckReport:
        config = EngineConfig(
            model="toy", device="cpu", max_running=4, max_model_len=120, page_size=4, speculation=speculation,
            graphs=graphs or Graphs(),
        )  # fmt: skip
        options = {"source": source, "max_new_tokens": TOKENS, "concurrency": 4} | options
        folder = tmp_path / "out"
        folder.mkdir(exist_ok=True)
        return run_check(config, CheckOptions(**options), folder)

    return call


@pytest.mark.parametrize(("name", "schedule"), [("self", "v2"), ("ngram", "v1")])
def test_equal_output(toy: Any, check: Any, tmp_path: Path, name: str, schedule: str) -> None:
    report = check(replace(SPECULATIONS[name], schedule=schedule))
    assert (report.summary()["equal"], report.summary()["diverging"], report.faults) == (COUNT, 0, [])
    names = [f"p{number}" for number in range(COUNT)]
    assert [item.id for item in report.findings] == names
    wanted = [toy.greedy(prompt)[:TOKENS] for prompt in toy.prompts()[:COUNT]]
    lengths = [text.index(toy.eos) + 1 if toy.eos in text else TOKENS for text in wanted]
    assert [item.equal for item in report.findings] == lengths
    text = report.markdown()
    assert f"PASSED: {COUNT} of {COUNT} prompts have the baseline's tokens." in text
    assert "| reached draft 1, 2, ... (%)" in text
    assert report.record.metrics["drafted_tokens"]
    assert report.record.config["speculation"]["schedule"] == schedule
    work = report.record.workload
    assert (work["command"], work["prompts"], work["equal"], work["faults"]) == ("check", COUNT, COUNT, [])
    assert work["source"].endswith("in.jsonl")
    assert len(report.record.requests) == COUNT, "the baseline's are not among them"
    folder = tmp_path / "out"
    assert load_record("folder", folder) == report.record
    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == names
    assert (folder / "summary.md").read_text() == text + "\n"


def test_referee_judges_what_the_engine_saw(check: Any) -> None:
    report = check(SPECULATIONS["self"])
    judged = [item.index for item in report.findings if item.plain.places]
    assert judged == [1, 2, 3, 5], "prompts with log-probabilities"
    assert report.errors is not None
    assert report.errors.prompts == len(judged)
    assert report.errors.smallest is None
    assert "FEW PROMPTS" in report.markdown()
    assert "Smallest detectable difference" not in report.markdown()
    assert 0 < report.errors.checked < 1e-4
    assert report.below is not None
    assert report.below.checked < 1e-5
    assert max(max(item.checked.errors) for item in report.judged) < 1e-3
    few = check(SPECULATIONS["self"], prompts=1)
    assert [item.index for item in few.judged] == [0], "without log-probabilities, in place of none"
    broken = replace(report, findings=[replace(x, plain=replace(x.plain, error="of NaN")) for x in report.findings])
    assert broken.faults == [f"{COUNT} requests failed: of NaN"]
    everything = check(SPECULATIONS["self"], referee="none")
    assert not everything.judged
    assert not everything.fails
    assert "* referee: none" in everything.markdown()


def test_checked_engine_runs_from_graphs_and_the_baseline_does_not(check: Any, monkeypatch: Any) -> None:
    fake_graphs(monkeypatch)
    configs: list[EngineConfig] = []

    def load(name: str, config: EngineConfig, *rest: Any, **more: Any) -> Any:
        configs.append(config)
        return load_engine(name, config, *rest, **more)

    monkeypatch.setattr("specbatch.sweeps.check.run.load_engine", load)
    report = check(SPECULATIONS["self"], Graphs("whole", "piecewise"), prompts=3)
    assert [item.id for item in report.findings] == ["p0", "p1", "p2"], "the first prompts of the file"
    assert report.summary()["equal"] == 3
    assert report.record.counters["graphs"]["decode"]["replays"] > 0
    assert "NO REPLAYS" not in report.markdown()
    plain, checked = configs
    assert str(plain.speculation) == "no speculation, schedule v1"
    assert (plain.graphs, plain.prefix_cache) == (Graphs(), False)
    assert (checked.graphs, checked.prefix_cache) == (Graphs("whole", "piecewise"), True)


# -- divergences ------------------------------------------------------------------------------------------------------


def test_wrong_acceptance_is_located_and_measured(toy: Any, check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    every_draft_accepted(monkeypatch)
    report = check(SPECULATIONS["other"])
    assert report.fails
    assert report.worst > report.bound == 512
    assert report.below is not None
    assert report.below.checked > 0.1 > 1e-5 > report.below.baseline
    assert report.summary()["diverging"] == len(report.judged) == COUNT
    for item, prompt in zip(report.findings, toy.prompts(), strict=False):
        wanted = toy.greedy(prompt)
        plain, checked = (side.at(item.equal) for side in item.answers)
        assert plain["token"] == wanted[item.equal] != checked["token"]
        logits = toy.logits([*prompt, *wanted[: item.equal]])[-1]
        assert plain["below"] == pytest.approx(0, abs=1e-4)
        assert checked["below"] == pytest.approx(float(logits.max() - logits[checked["token"]]), abs=1e-3)
    text = report.markdown()
    assert "FAILED: " in text
    assert "units in the last place below the referee's best" in text
    assert "| p0 " in text
    assert "DIVERGENCES IN FLOAT32" in text
    assert "quantized to FP8" not in text
    report.record.caps["fp8_activations"] = "on"
    assert "quantized to FP8" in report.markdown()


def test_without_a_referee_every_difference_counts(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    every_draft_accepted(monkeypatch)
    report = check(SPECULATIONS["other"], referee="none")
    assert report.faults == [f"{COUNT} answers with other tokens, and no referee was asked"]


def done(*tokens: int) -> Completion:
    return Completion(0, [7, 7], list(tokens), "", "length", RequestMetrics())


@pytest.mark.parametrize(
    ("plain", "checked", "equal", "diverges", "early"),
    [
        ((1, 2, 0), (1, 2, 0), 3, False, False),
        ((1, 2, 0), (1, 2, 1), 2, True, False),
        ((1, 2), (1, 2, 0), 2, True, True),
        ((1, 2, 0), (1, 2), 2, True, True),
        ((1, 2), (), 0, True, True),
    ],
)
def test_divergence_of_one_prompt(plain: Any, checked: Any, equal: int, diverges: bool, early: bool) -> None:
    found = _compare(done(*plain), done(*checked), None)
    assert (found.equal, found.diverges, found.ends_early) == (equal, diverges, early)
    assert found.prompt == [7, 7]


def judged(plain: list[float], checked: list[float], *, errors: list[float], equal: int) -> Finding:
    """A prompt of which the answers have these gaps and the baseline these errors, in units in the last place."""
    unit, scale = 0.125, [16.0] * len(plain)
    own = [unit * error for error in errors]
    sides = [
        Answer([0] * len(plain), own, Places([unit * gap for gap in gaps], scale, [0.0] * len(plain)))
        for gaps in (plain, checked)
    ]
    return Finding(0, None, equal, equal < len(plain), sides[0], sides[1], [7])


def test_worst_token_and_its_bound() -> None:
    outlier = judged([0, 90, 0], [0, 90, 4], errors=[1, 0, 0], equal=2)
    error = judged([0, 0, 0], [0, 0, 0], errors=[1, -3, 1], equal=3)
    quiet = judged([0, 1, 0], [0, 1, 11], errors=[1, 2, 0], equal=2)
    record: Any = SimpleNamespace(caps={"dtype": "bfloat16"})

    def found(*findings: Finding) -> tuple[float, float]:
        report = CheckReport(CheckOptions(), list(findings), record)
        return report.worst, report.bound

    assert found(outlier, quiet) == (11, 8), "neither the outlier nor a token that both chose decides"
    assert found(outlier, quiet, error) == (11, 12), "errors of log-probabilities are noise, too"
    assert found(outlier, outlier, quiet) == (11, 360)
    assert (outlier.row("bfloat16")["noise_units"], outlier.row("bfloat16")["worst_units"]) == (90, 4)


# -- prompts and records ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 7, 8])
def test_every_second_random_prompt_repeats_its_first_half(length: int) -> None:
    tokenizer = SimpleNamespace(vocab_size=50, eos_ids=frozenset({3}), bos_id=5)
    prompts = random_prompts(CheckOptions(random=True, input_len=length, prompts=5), tokenizer, 4)  # type: ignore[arg-type]
    assert [len(prompt) for prompt in prompts] == [length] * 5
    half = (length + 1) // 2
    assert all(prompt[half:] == prompt[: length - half] for prompt in prompts[1::2])
    other = random_prompts(CheckOptions(random=True, input_len=length, prompts=5), tokenizer, 5)  # type: ignore[arg-type]
    assert prompts != other


def test_check_without_drafts_says_so_in_its_verdict(check: Any) -> None:
    report = check(Speculation("ngram", ngram_min=16, ngram_max=16), prompts=2, max_new_tokens=2)
    assert "PASSED, but nothing was drafted, so drafts were not tested: 2 of 2 prompts" in report.markdown()
    assert "it judged 1 prompt\n" in report.markdown()
    assert "PASSED: 1 of 1" in check(SPECULATIONS["none"], prompts=1, max_new_tokens=2).markdown()


def test_simulated_acceptance_is_refused(check: Any) -> None:
    with pytest.raises(SpecbatchError, match=r"simulate_accept_length=2\.0: the text is not"):
        check(Speculation("ngram", simulate_accept_length=2.0))


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.chdir(tmp_path)
    toy = (
        "--model",
        "toy",
        "--load-format",
        "dummy",
        "--device",
        "cpu",
        "--max-new-tokens",
        12,
        "--random",
        "--input-len",
        9,
    )
    return lambda *words: CliRunner().invoke(app, ["check", *map(str, (*words, *toy))])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), ("ngram", "v2")),
        (("--spec", "v1", "--draft", "self:skip=0"), ("standalone", "v1")),
        (("--spec", "off"), ("none", "v2")),
    ],
)
def test_equal_output_exits_with_0(run: Any, words: tuple[str, ...], expected: tuple[str, str]) -> None:
    result = run("--prompts", 2, "--output", "out", *words)
    assert result.exit_code == 0, result.output
    assert "2 of 2 prompts have the baseline's tokens." in result.stdout
    files = {path.name for path in Path("out").iterdir()}
    assert files == {"record.json", "requests.jsonl", "prompts.jsonl", "summary.md"}
    speculation = json.loads(Path("out/record.json").read_text())["config"]["speculation"]
    assert (speculation["algorithm"], speculation["schedule"]) == expected


def test_fault_exits_with_1(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    every_draft_accepted(monkeypatch)
    result = run("--draft", "self:skip=0-2", "--prompts", 4, "--json")
    assert result.exit_code == 1
    (line,) = result.stdout.splitlines()
    body = json.loads(line)
    assert body["diverging"] + body["equal"] == body["prompts"] == len(body["rows"]) == 4
    assert body["faults"]
    assert Path(body["output"], "prompts.jsonl").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("in.jsonl",), "--random: a file has the prompts"),
        (("--sampled",), "--random: sampled needs prompts of text"),
        (("--referee", "float16"), "referee='float16': use one of float32, same, none"),
    ],
)
def test_refused_options_exit_with_2(run: Any, words: tuple[str, ...], message: str) -> None:
    result = run(*words)
    assert result.exit_code == 2
    assert message in result.stderr


def test_prompt_that_does_not_fit_exits_with_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt_token_ids": [3] * 60}) + "\n")
    toy = ("--model", "toy", "--load-format", "dummy", "--device", "cpu", "--max-new-tokens", "12")
    result = CliRunner().invoke(app, ["check", "in.jsonl", "--max-model-len", "64", *toy])
    assert result.exit_code == 2
    assert "--max-model-len=64" in result.stderr


def test_bundled_prompts_that_do_not_fit_are_left_out_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    toy = ("--model", "toy", "--load-format", "dummy", "--device", "cpu", "--max-new-tokens", "2", "--spec", "off")
    words = ("--max-model-len", "150", "--prompts", "8", "--referee", "none", "--output", "out")
    result = CliRunner().invoke(app, ["check", *words, *toy])
    assert result.exit_code == 0, result.output
    work = json.loads(Path("out/record.json").read_text())["workload"]
    assert 0 < work["prompts_left_out"] == 8 - work["prompts"] < 8
    expected = (
        f"{work['prompts_left_out']} of 8 prompts are left out: with 2 tokens of answer they are longer than the 150"
    )
    assert expected in Path("out/summary.md").read_text()
