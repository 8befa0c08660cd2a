"""An interrupted evaluation continues: finished answers are not generated again, and none is lost."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from specbatch.config.engine_config import EngineConfig
from specbatch.errors import SpecbatchError
from specbatch.evals.options import EvalOptions
from specbatch.evals.report import EvalReport
from specbatch.evals.run import prepare, run_eval
from specbatch.sweeps.report.compare import compare

PARTIAL = "answers.partial.jsonl"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def without_times(questions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if not name.endswith("_s")} for row in questions]


@pytest.fixture
def interrupted(make_engine: Any, evaluate: Any, mixed_reply: Any, tmp_path: Path) -> Path:
    """The folder of an evaluation of 8 questions that was interrupted after 3."""
    engine = make_engine(mixed_reply)
    engine.stop_after = 3
    with pytest.raises(KeyboardInterrupt):
        evaluate(engine=engine, output=tmp_path / "out")
    return tmp_path / "out"


def test_answers_of_earlier_versions_are_kept(
    interrupted: Path, make_engine: Any, evaluate: Any, mixed_reply: Any
) -> None:
    """They wrote fewer numbers of each request."""
    head, *rows = lines(interrupted / PARTIAL)
    for row in rows:
        del row["untrimmed_histogram"]
    (interrupted / PARTIAL).write_text("".join(json.dumps(row) + "\n" for row in (head, *rows)))
    engine = make_engine(mixed_reply)
    evaluate(engine=engine, output=interrupted)
    assert len(engine.calls[0]["prompts"]) == 5


def test_only_missing_answers_are_generated(
    interrupted: Path, make_engine: Any, evaluate: Any, mixed_reply: Any, report: EvalReport
) -> None:
    engine, seen = make_engine(mixed_reply), []
    found = evaluate(engine=engine, output=interrupted, progress=lambda done, wanted: seen.append((done, wanted)))
    assert len(engine.calls[0]["prompts"]) == 5
    assert seen == [(done, 8) for done in range(4, 9)]
    assert without_times(found.questions) == without_times(report.questions)
    assert [score.value for score in found.scores] == [score.value for score in report.scores]
    assert not (interrupted / PARTIAL).exists()
    saved = EvalReport.load(interrupted)
    assert saved.questions == found.questions
    assert saved.record.workload["earlier_answers"] == 3
    assert [row["index"] for row in saved.record.requests] == list(range(8))
    metrics = saved.record.metrics
    assert (metrics["requests"], metrics["accept_length"], metrics["accept_rate"]) == (8, 2.5, 3 / 8)
    assert "output_throughput" not in metrics
    assert "mean_ttft_s" not in metrics
    assert "3 of 8 answers come from an interrupted run" in found.table()


def test_compare_shows_that_an_evaluation_was_continued(
    interrupted: Path, evaluate: Any, report: EvalReport, report_folder: Path
) -> None:
    evaluate(output=interrupted)
    text = compare(report_folder, interrupted).markdown()
    assert "3 of 8 answers come from earlier, interrupted runs" in text
    assert "throughput and times over all prompts are unknown" in text
    assert "8 questions, paired: 0 lost, 0 gained" in text


def test_all_answers_finished_but_no_report(make_engine: Any, evaluate: Any, mixed_reply: Any, tmp_path: Path) -> None:
    class Failing(make_engine):
        def record(self, **known: Any) -> Any:
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        evaluate(engine=Failing(mixed_reply), output=tmp_path / "out")
    engine = make_engine(mixed_reply)
    found = evaluate(engine=engine, output=tmp_path / "out")
    assert engine.calls[0]["prompts"] == []
    assert found.record.workload["earlier_answers"] == 8


@pytest.mark.parametrize(
    ("setting", "value", "difference"),
    [
        ("limit", 4, "limit (not set there, 4 now)"),
        ("max_new_tokens", 9, "max_new_tokens (not set there, 9 now)"),
        ("num_fewshot", 3, "num_fewshot (5 there, 3 now)"),
        ("seed", 7, "fewshot_seed (1234 there, 7 now)"),
        ("chat_template", True, "chat_template (False there, True now)"),
        ("temperature", 0.6, "temperature (not set there, 0.6 now)"),
    ],
)
def test_other_settings_are_refused(
    interrupted: Path, evaluate: Any, setting: str, value: object, difference: str
) -> None:
    with pytest.raises(SpecbatchError, match=re.escape(difference)):
        evaluate(output=interrupted, **{setting: value})
    assert len(lines(interrupted / PARTIAL)) == 4


def test_other_engine_is_refused_before_it_is_loaded(interrupted: Path, scored_file: Path) -> None:
    ready = prepare(EvalOptions("gsm8k", data=scored_file, output=interrupted))
    with pytest.raises(SpecbatchError, match=r"seed \(0 there, 5 now\)"):
        ready.finished(EngineConfig(seed=5))


def test_changed_questions_are_refused(interrupted: Path, evaluate: Any, write_rows: Any, make_rows: Any) -> None:
    with pytest.raises(SpecbatchError, match="task='gsm8k': its prompts are not those of the run that was interrupted"):
        evaluate(output=interrupted, data=write_rows("other.jsonl", make_rows(200, 8)))
    assert len(lines(interrupted / PARTIAL)) == 4


def test_overwrite_starts_over(interrupted: Path, make_engine: Any, evaluate: Any, mixed_reply: Any) -> None:
    engine = make_engine(mixed_reply)
    found = evaluate(engine=engine, output=interrupted, limit=4, overwrite=True)
    assert len(engine.calls[0]["prompts"]) == 4
    assert "earlier_answers" not in found.record.workload


def test_finished_evaluation_is_not_overwritten(
    evaluate: Any, make_engine: Any, mixed_reply: Any, tmp_path: Path
) -> None:
    """The same one is found as it is, another one is refused."""
    first = evaluate(output=tmp_path / "out", limit=1)
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*.*")}
    engine = make_engine(mixed_reply)
    again = evaluate(engine=engine, output=tmp_path / "out", limit=1)
    assert (again.as_dict(), again.questions, engine.calls) == (first.as_dict(), first.questions, [])
    for other in ({"overwrite": True}, {"limit": 2}, {"max_new_tokens": 7}):
        with pytest.raises(SpecbatchError, match="exists and is not empty; name a new folder"):
            evaluate(output=tmp_path / "out", **{"limit": 1} | other)
    assert {path: path.read_bytes() for path in (tmp_path / "out").rglob("*.*")} == before


def test_failed_answer_is_generated_again(make_engine: Any, evaluate: Any, mixed_reply: Any, tmp_path: Path) -> None:
    class Failing(make_engine):
        def answer(self, place: int, *args: Any) -> Any:
            completion = super().answer(place, *args)
            if place == 6:
                completion.finish_reason, completion.error = "error", "logits are not finite"
            return completion

    engine = Failing(mixed_reply)
    engine.stop_after = 3
    with pytest.raises(KeyboardInterrupt, match=r"kept the finished answers \(2\)"):
        evaluate(engine=engine, output=tmp_path / "out")
    again = make_engine(mixed_reply)
    evaluate(engine=again, output=tmp_path / "out")
    assert len(again.calls[0]["prompts"]) == 6


def test_sampled_answers_do_not_depend_on_the_interruption(make_engine: Any, evaluate: Any, tmp_path: Path) -> None:
    """Each request has a seed of its own: an answer to the same question as a kept one must not repeat its numbers."""
    engine, whole = make_engine(lambda prompt: " 100."), make_engine(lambda prompt: " 100.")
    options = {"task": "gsm8k_cot_self_consistency", "limit": 1, "max_new_tokens": 40}
    evaluate(engine=whole, **options)
    engine.stop_after = 60
    with pytest.raises(KeyboardInterrupt):
        evaluate(engine=engine, output=tmp_path / "out", **options)
    rest = make_engine(lambda prompt: " 100.")
    evaluate(engine=rest, output=tmp_path / "out", **options)
    seeds = [params.seed for params in whole.calls[0]["params"]]
    assert len(set(seeds)) == 64
    assert [params.seed for params in rest.calls[0]["params"]] == seeds[:4]


def test_likelihood_task_continues(make_engine: Any, tmp_path: Path) -> None:
    options = EvalOptions("one_digit_choices", limit=5, output=tmp_path / "out")
    whole = run_eval(make_engine(lambda prompt: " 1"), EvalOptions("one_digit_choices", limit=5))
    engine = make_engine(lambda prompt: " 1")
    engine.stop_after = 7
    with pytest.raises(KeyboardInterrupt, match=r"kept the finished answers \(7\)"):
        run_eval(engine, options)
    rest = make_engine(lambda prompt: " 1")
    found = run_eval(rest, options)
    assert len(rest.pairs) == whole.record.metrics["requests"] - 7
    assert found.questions == whole.questions
    assert [score.value for score in found.scores] == [score.value for score in whole.scores]
    assert found.record.metrics["requests"] == whole.record.metrics["requests"]
    assert found.record.metrics["scored_tokens"] == whole.record.metrics["scored_tokens"]
    assert "7 of" in found.table()


SLOW = """
import sys, time
from pathlib import Path
sys.path[:0] = sys.argv[1:3]
from conftest import FakeEngine
from specbatch.evals.run import EvalOptions, run_eval

def slow(prompt):
    time.sleep(0.05)
    return " 1"

run_eval(FakeEngine(slow), EvalOptions("gsm8k", limit=40, num_fewshot=1, output=Path(sys.argv[3])))
"""


@pytest.mark.slow
def test_kill_loses_no_finished_answer(make_engine: Any, tmp_path: Path) -> None:
    output, partial = tmp_path / "out", tmp_path / "out" / PARTIAL
    folders = (Path(__file__).parent, Path(__file__).parents[1] / "kit")  # of conftest and of what it imports
    process = subprocess.Popen([sys.executable, "-c", SLOW, *map(str, folders), str(output)], env=os.environ)
    while process.poll() is None and (not partial.exists() or partial.read_bytes().count(b"\n") < 5):
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    finished = partial.read_bytes().count(b"\n") - 1
    assert 4 <= finished < 40
    engine = make_engine(lambda prompt: " 1")
    options = EvalOptions("gsm8k", limit=40, num_fewshot=1, output=output)
    found = run_eval(engine, options)
    assert len(engine.calls[0]["prompts"]) == 40 - finished
    assert [row["doc_id"] for row in found.questions] == list(range(40))
    assert found.record.workload["earlier_answers"] == finished


def test_an_interruption_without_answers_says_nothing_of_answers(
    make_engine: Any, mixed_reply: Any, scored_file: Path, tmp_path: Path
) -> None:
    engine = make_engine(mixed_reply)
    engine.stop_after = 0
    with pytest.raises(KeyboardInterrupt) as stopped:
        run_eval(engine, EvalOptions("gsm8k", data=scored_file, output=tmp_path / "out"))
    assert not any((tmp_path / "out").iterdir())
    error: BaseException | None = stopped.value
    while error is not None:  # the command line prints the message of the first one that has one
        assert error.args == ()
        error = error.__context__
