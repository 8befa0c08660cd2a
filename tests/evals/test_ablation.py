"""An ablation: its table, the configurations that are left out, and what is kept after a failure."""

from __future__ import annotations

import csv
import json
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from lm_eval.api.task import ConfigurableTask

from specbatch.config import EngineConfig, Speculation
from specbatch.errors import SpecbatchError
from specbatch.evals import ablation
from specbatch.evals.ablation import configurations, run_ablation
from specbatch.evals.run import EvalOptions, run_eval
from specbatch.memory.planner import MemoryShare

BASE = EngineConfig(speculation=Speculation("ngram"))


@pytest.fixture
def ablate(
    monkeypatch: pytest.MonkeyPatch,
    make_engine: Any,
    mixed_reply: Any,
    scored_file: Path,
    shots_file: Path,
    tmp_path: Path,
) -> Any:
    """Engines that give the same answers, except for v2's first question."""
    made: list[tuple[str, Any, MemoryShare]] = []

    @contextmanager
    def load(name: str, config: EngineConfig, log: Any, *, weights_of: Any, share: MemoryShare) -> Any:
        if name == "v2+piecewise":
            raise MemoryError("no room")
        odd = ["? "] if name == "v2" else []
        engine = make_engine(lambda text: (odd.pop() if odd and forgot else "") + mixed_reply(text))
        forgot: list[int] = []  # calls before prefixes were forgotten
        engine.forget_prefixes = lambda: forgot.append(len(engine.calls))
        plain = engine.record
        engine.record = lambda **known: replace(plain(**known), config=config.as_dict() | {"model": "fake"})
        made.append((name, weights_of, share))
        yield engine

    monkeypatch.setattr(ablation, "load_engine", load)
    monkeypatch.setattr(ablation, "check_draft", lambda *_: None)

    def run(on_cuda: bool = False) -> Any:
        configs, left_out = configurations(BASE, on_cuda)
        options = EvalOptions("gsm8k", data=scored_file, fewshot_data=shots_file, num_fewshot=3)
        seen: list[tuple[int, int]] = []
        found = run_ablation(configs, options, tmp_path, left_out=left_out, progress=lambda *at: seen.append(at))
        return found, made, seen

    return run


def test_table_has_no_empty_cell_and_compares_answers(ablate: Any, tmp_path: Path) -> None:
    found, made, seen = ablate()
    rows = found.rows()
    assert [row["configuration"] for row in rows] == ["baseline", "v1", "v2"]
    assert all(cell.strip() for row in rows for cell in row.values())
    assert [row["same answers"] for row in rows] == ["8 of 8", "8 of 8", "7 of 8"]
    assert [row["accept length"] for row in rows] == ["no speculation", "2.500", "2.500"]
    assert rows[0]["strict-match exact_match"].startswith("0.2500 ± 0.1637, 75.0% unparsed")
    assert {row["speed"] for row in rows[:2]} == {"1.00"}
    assert "v2+piecewise: left out, piecewise prefill graphs need a CUDA device" in found.table()
    assert seen[-1] == (24, 24)
    assert [share for _, _, share in made] == [MemoryShare(n, 3) for n in range(3)]
    assert made[0][1] is None
    assert made[1][1] is made[2][1] is not None  # the first engine's weights
    assert len(list(csv.DictReader((tmp_path / "ablation.csv").open()))) == 3
    assert set(json.loads((tmp_path / "ablation.json").read_text())["configurations"]) == {"baseline", "v1", "v2"}
    assert (tmp_path / "v1" / "questions.jsonl").exists()


def test_interruption_reports_what_is_kept(ablate: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    warm_up, rest = ablation._warm_up, ["baseline"]

    def stop(*args: Any) -> None:
        if not rest:
            raise KeyboardInterrupt
        rest.pop()
        warm_up(*args)

    monkeypatch.setattr(ablation, "_warm_up", stop)
    with pytest.raises(KeyboardInterrupt, match=r"^kept 1 of 3 configurations \(baseline\) in "):
        ablate()
    assert "baseline" in (tmp_path / "ablation.md").read_text()


def test_interrupted_ablation_continues(ablate: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The finished configuration is not run again, and of the other one only the missing answers are generated."""
    warm_up, started = ablation._warm_up, []

    def stop_in_v1(ready: Any, engine: Any) -> None:
        warm_up(ready, engine)
        started.append(engine)
        if len(started) == 2:
            engine.stop_after = 3

    monkeypatch.setattr(ablation, "_warm_up", stop_in_v1)
    with pytest.raises(KeyboardInterrupt, match=r"^kept 1 of 3 configurations \(baseline\) in .*; the same command"):
        ablate()
    found, made, seen = ablate()
    names = ["baseline", "v1"]  # of the interrupted run
    assert [name for name, _, _ in made] == [*names, "v1", "v2"]
    assert [share for _, _, share in made[2:]] == [MemoryShare(0, 3), MemoryShare(1, 3)]
    assert len(started[2].calls[-1]["prompts"]) == 5
    assert [row["same answers"] for row in found.rows()] == ["8 of 8", "8 of 8", "7 of 8"]
    assert found.reports["v1"].record.workload["earlier_answers"] == 3
    assert seen[-1] == (24, 24)
    assert not list(tmp_path.rglob("*.partial.jsonl"))


def test_ablation_with_other_settings_is_refused(ablate: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def stop(ready: Any, engine: Any) -> None:
        engine.stop_after = 0

    monkeypatch.setattr(ablation, "_warm_up", stop)
    with pytest.raises(KeyboardInterrupt, match="kept 0 of 3 configurations in"):
        ablate()
    with pytest.raises(SpecbatchError, match=r"ablation.partial.jsonl.*num_fewshot \(3 there, 5 now\)"):
        run_ablation(configurations(BASE, False)[0], EvalOptions("gsm8k", num_fewshot=5), tmp_path)
    with pytest.raises(SpecbatchError, match=r"temperature \(None there, 0.6 now\)"):
        run_ablation(configurations(BASE, False)[0], EvalOptions("gsm8k", temperature=0.6), tmp_path)


def test_configurations_get_the_same_prompts(
    ablate: Any, make_engine: Any, scored_file: Path, shots_file: Path
) -> None:
    """Few-shot examples are drawn at random, and an earlier run has drawn some already."""
    found, _, _ = ablate()
    alone = run_eval(
        make_engine(lambda text: "?"), EvalOptions("gsm8k", data=scored_file, fewshot_data=shots_file, num_fewshot=3)
    )
    assert {report.prompts_sha256 for report in found.reports.values()} == {alone.prompts_sha256}


def test_task_with_different_prompts_in_each_run_is_refused(ablate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    text_of, number = ConfigurableTask.doc_to_text, count()
    monkeypatch.setattr(ConfigurableTask, "doc_to_text", lambda *args: f"{next(number)} {text_of(*args)}")
    with pytest.raises(SpecbatchError, match="task='gsm8k': builds different prompts in each run"):
        ablate()


def test_each_configuration_is_warmed_up_before_it_is_measured(ablate: Any) -> None:
    found, made, _ = ablate()
    for _, engine, _ in made[1:]:
        warm_up, measured = engine.calls
        assert {params.max_new_tokens for params in warm_up["params"]} == {16}
        assert {params.max_new_tokens for params in measured["params"]} == {512}
        assert len(measured["prompts"]) == 8
    assert found.reports["v1"].record.metrics["requests"] == 8


def test_finished_results_are_kept_when_a_configuration_fails(ablate: Any, tmp_path: Path) -> None:
    with pytest.raises(MemoryError):
        ablate(on_cuda=True)
    assert len(list(csv.DictReader((tmp_path / "ablation.csv").open()))) == 3
