"""`specbatch check`: every algorithm equals the baseline token for token; what is not is found, placed and measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stand_ins import fake_graphs
from typer.testing import CliRunner, Result

from specbatch import EngineConfig, SpecbatchError, Speculation
from specbatch.cli.app import app
from specbatch.config import Graphs
from specbatch.core.request import Completion, RequestMetrics
from specbatch.engine import acceptance
from specbatch.records.run_record import RunRecord
from specbatch.sweeps.check import CheckOptions, CheckReport, _compare, _encode, run_check

SPECULATIONS = {
    "none": Speculation(),
    "ngram": Speculation("ngram", draft_tokens=3, ngram_min=1),
    "self": Speculation("standalone", draft="self:skip=1"),
    "other": Speculation("standalone", draft="toy-2", draft_tokens=2),
}


@pytest.fixture
def check(toy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., CheckReport]:
    """check(speculation, setting of CheckOptions=...) over the toy model; the toy's own prompts unless told."""
    checkpoint = type(toy.checkpoint)
    monkeypatch.setattr("specbatch.weights.open_checkpoint", lambda model, *_, **__: checkpoint(model))
    source = tmp_path / "in.jsonl"
    prompts = toy.prompts()[:12]
    source.write_text(
        "".join(json.dumps({"prompt_token_ids": prompt, "id": f"p{i}"}) + "\n" for i, prompt in enumerate(prompts))
    )

    def call(speculation: Speculation, graphs: Graphs | None = None, **options: Any) -> CheckReport:
        config = EngineConfig(
            model="toy", device="cpu", max_running=4, max_model_len=120, page_size=4, speculation=speculation,
            graphs=graphs or Graphs(),
        )  # fmt: skip
        options = {"source": source, "max_new_tokens": 30, "concurrency": 4} | options
        folder = tmp_path / f"out{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        return run_check(config, CheckOptions(**options), folder)

    return call


def accept_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verify that believes every draft."""

    def believe(logits: Any, proposal: Any, positions: Any, sampling: Any, simulate: Any = None) -> Any:
        found = acceptance.RefResult(*judge(logits, proposal, positions, sampling, simulate))
        tokens = torch.cat([proposal.tokens, found.tokens[:, -1:]], 1)
        return found._replace(tokens=tokens, accepted=torch.full_like(found.accepted, proposal.tokens.shape[1]))

    judge = acceptance.accept_ref
    monkeypatch.setattr(acceptance, "accept_ref", believe)


# -- what is equal ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "schedule"), [("self", "v2"), ("ngram", "v1")])
def test_every_algorithm_is_equal_under_both_schedules(toy: Any, check: Any, name: str, schedule: str) -> None:
    report = check(replace(SPECULATIONS[name], schedule=schedule), margin=0.0)
    assert report.counts() == {"prompts": 12, "equal": 12, "near_ties": 0, "differing": 0}
    assert not report.differs
    assert [item.id for item in report.findings] == [f"p{number}" for number in range(12)]
    wanted = [toy.greedy(prompt)[:30] for prompt in toy.prompts()[:12]]
    lengths = [text.index(toy.eos) + 1 if toy.eos in text else 30 for text in wanted]
    assert [item.equal for item in report.findings] == lengths
    assert "12 of 12 prompts have the baseline's tokens." in report.markdown()
    assert bool(report.record.metrics["drafted_tokens"]) == (name != "none")
    assert report.record.config["speculation"]["schedule"] == schedule


def test_what_is_checked_runs_from_graphs_and_plain_decoding_does_not(check: Any, monkeypatch: Any) -> None:
    fake_graphs(monkeypatch)
    made: list[EngineConfig] = []
    monkeypatch.setattr("specbatch.sweeps.check.load_engine", noting(made))
    report = check(SPECULATIONS["self"], Graphs("whole", "piecewise"))
    assert report.counts()["equal"] == 12
    assert report.record.counters["graphs"]["decode"]["replays"] > 0
    assert "NO REPLAYS" not in report.markdown()
    plain, checked = made
    assert (str(plain.speculation), plain.graphs, plain.prefix_cache) == (
        "no speculation, schedule v1",
        Graphs(),
        False,
    )
    assert (checked.graphs, checked.prefix_cache) == (Graphs("whole", "piecewise"), True)


def noting(made: list[EngineConfig]) -> Callable[..., Any]:
    from specbatch.jobs.configurations import load_engine

    def load(name: str, config: EngineConfig, *rest: Any, **more: Any) -> Any:
        made.append(config)
        return load_engine(name, config, *rest, **more)

    return load


# -- what differs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["v1", "v2"])
def test_a_wrong_acceptance_is_found_placed_and_measured(
    toy: Any, check: Any, monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    accept_everything(monkeypatch)
    report = check(replace(SPECULATIONS["other"], schedule=schedule))
    assert report.differs
    assert report.count("equal") == 0
    for item, prompt in zip(report.findings, toy.prompts(), strict=False):
        wanted = toy.greedy(prompt)
        assert item.plain == wanted[item.equal] != item.checked
        logits = toy.logits([*prompt, *wanted[: item.equal]])[-1]
        first, second = logits.topk(2).values.tolist()
        assert item.margin == pytest.approx(first - second, abs=1e-3)
        assert item.gap == pytest.approx(first - float(logits[item.checked]), abs=1e-3)
        assert item.gap >= item.margin - 1e-6
        assert item.verdict == ("near tie" if item.gap <= 0.1 else "differs")
    text = report.markdown()
    assert "DIFFER." in text
    assert "| p0 " in text
    assert "Margin: the baseline's" in text


def test_the_margin_decides_what_a_near_tie_is(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    accept_everything(monkeypatch)
    gaps = sorted(item.gap for item in check(SPECULATIONS["other"]).findings)
    report = check(SPECULATIONS["other"], margin=gaps[5] + 1e-3)
    found = {item.id: item for item in report.findings}
    assert report.count("near tie") == sum(gap <= gaps[5] + 1e-3 for gap in gaps)
    assert all((item.verdict == "near tie") == (item.gap <= gaps[5] + 1e-3) for item in found.values())
    assert report.differs
    wide = check(SPECULATIONS["other"], margin=1e3)
    assert (wide.count("near tie"), wide.differs) == (12, False)
    assert "NEAR TIES IN FLOAT32, where none are expected" in wide.markdown()
    assert "rounded to float8" not in wide.markdown()
    wide.record.caps["float8_activations"] = "on"
    assert "Activations were rounded to float8" in wide.markdown()
    assert "rounded to float8" not in replace(wide, findings=[]).markdown()


def done(*tokens: int) -> Completion:
    return Completion(0, [7, 7], list(tokens), "", "length", RequestMetrics())


@pytest.mark.parametrize(
    ("plain", "checked", "verdict", "equal", "gap"),
    [
        ((1, 2, 0), (1, 2, 0), "equal", 3, None),
        ((1, 2, 0), (1, 2, 1), "near tie", 2, 0.0625),
        ((1, 2, 1), (1, 2, 0), "near tie", 2, 0.0625),  # the pass sides with the other: as near
        ((1, 0, 0), (1, 3, 0), "differs", 1, 5.0),  # the margin is small, and token 3 is out of nowhere
        ((1, 2), (1, 2, 0), "differs", 2, None),
        ((1, 2, 0), (1, 2), "differs", 2, None),
    ],
)
def test_one_prompt(plain: Any, checked: Any, verdict: str, equal: int, gap: float | None) -> None:
    asked: list[list[int]] = []

    def next_logits(tokens: list[int]) -> torch.Tensor:
        asked.append(tokens)
        return torch.tensor([5.0, 4.9375, 1.0, 0.0])

    found = _compare(done(*plain), done(*checked), None, 0.0625, next_logits)
    assert (found.verdict, found.equal, found.gap) == (verdict, equal, gap)
    assert asked == ([] if gap is None else [[7, 7, *plain[:equal]]])
    assert found.margin == (None if gap is None else 0.0625)


# -- prompts and records ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 7, 8])
def test_every_second_random_prompt_has_something_to_look_up(length: int) -> None:
    tokenizer = SimpleNamespace(vocab_size=50, eos_ids=frozenset({3}), bos_id=5)
    prompts = _encode(None, CheckOptions(input_len=length, prompts=5), tokenizer, 4)  # type: ignore[arg-type]
    assert [len(prompt) for prompt in prompts] == [length] * 5
    half = (length + 1) // 2
    assert all(prompt[half:] == prompt[: length - half] for prompt in prompts[1::2])
    other = _encode(None, CheckOptions(input_len=length, prompts=5), tokenizer, 5)  # type: ignore[arg-type]
    assert prompts != other


def test_the_first_prompts_of_a_file(check: Any) -> None:
    assert [item.id for item in check(SPECULATIONS["ngram"], prompts=3).findings] == ["p0", "p1", "p2"]


def test_a_check_without_drafts_says_so(check: Any) -> None:
    report = check(Speculation("ngram", ngram_min=16, ngram_max=16), prompts=2, max_new_tokens=2)
    assert "NO DRAFTS" in report.markdown()
    assert "NO DRAFTS" not in check(SPECULATIONS["none"], prompts=1).markdown()


def test_the_record_holds_what_was_asked_and_found(check: Any, tmp_path: Path) -> None:
    report = check(SPECULATIONS["self"])
    (folder,) = tmp_path.glob("out*")
    assert RunRecord.load(folder) == report.record
    work = report.record.workload
    assert (work["command"], work["prompts"], work["equal"], work["margin"]) == ("check", 12, 12, 0.001)
    assert work["source"].endswith("in.jsonl")
    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == [f"p{number}" for number in range(12)]
    assert (folder / "summary.md").read_text() == report.markdown() + "\n"
    assert "| reached draft 1, 2, ... (%)" in report.markdown()
    assert len(report.record.requests) == 12, "passes for margins, and the plain engine's, are not among them"


def test_a_simulated_text_is_refused(check: Any) -> None:
    with pytest.raises(SpecbatchError, match=r"simulate_accept_length=2\.0: the text is not"):
        check(Speculation("ngram", simulate_accept_length=2.0))


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.chdir(tmp_path)
    toy = ("--model", "toy", "--load-format", "dummy", "--device", "cpu", "--max-new-tokens", 12, "--input-len", 9)
    return lambda *words: CliRunner().invoke(app, ["check", *map(str, (*words, *toy))])


@pytest.mark.parametrize("words", [(), ("--spec", "v1", "--draft", "self:skip=0"), ("--spec", "off")])
def test_equal_exits_with_0(run: Any, words: tuple[str, ...]) -> None:
    result = run("--prompts", 5, "--output", "out", *words)
    assert result.exit_code == 0, result.output
    assert "5 of 5 prompts have the baseline's tokens." in result.stdout
    assert {path.name for path in Path("out").iterdir()} == {
        *("record.json", "requests.jsonl", "prompts.jsonl", "summary.md")
    }
    asked = json.loads(Path("out/record.json").read_text())["config"]["speculation"]
    wanted = {(): ("ngram", "v2"), "v1": ("standalone", "v1"), "off": ("none", "v2")}[words[1] if words else ()]
    assert (asked["algorithm"], asked["schedule"]) == wanted


def test_a_difference_exits_with_1_and_a_near_tie_does_not(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    accept_everything(monkeypatch)
    words = ("--draft", "self:skip=0-2", "--prompts", 4)
    result = run(*words, "--json", "--margin", 0)
    assert result.exit_code == 1
    (line,) = result.stdout.splitlines()
    body = json.loads(line)
    assert body["differing"] + body["equal"] == body["prompts"] == len(body["rows"]) == 4
    assert body["differing"] > 0
    assert Path(body["output"], "prompts.jsonl").exists()
    assert run(*words, "--margin", 1e6).exit_code == 0


def test_a_prompt_that_does_not_fit_exits_with_2(run: Any, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt_token_ids": [3] * 60}) + "\n")
    result = run("in.jsonl", "--max-model-len", 64)
    assert result.exit_code == 2
    assert "max_model_len=64" in result.stderr
