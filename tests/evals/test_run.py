"""Runs of generating tasks: scores, rows, prompts, output files and interruptions."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from specbatch.config.engine_config import EngineConfig
from specbatch.errors import SpecbatchError
from specbatch.evals.report import EvalReport
from specbatch.evals.run import EvalOptions, prepare
from specbatch.files.atomic_file import UnwritableError
from specbatch.sweeps.run.unloaded import Unloaded


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_scores_computed_by_hand(report: Any) -> None:
    """Eight questions, two of each kind. strict-match: the two in GSM8K's form; flexible-extract: also the two that
    only name the number. Standard errors are sqrt(p (1 - p) / 7)."""
    strict, flexible = report.scores
    assert (strict.filter, strict.metric, strict.value, strict.n) == ("strict-match", "exact_match", 0.25, 8)
    assert strict.stderr == pytest.approx((0.25 * 0.75 / 7) ** 0.5)
    assert strict.unparsed == 0.75
    assert (flexible.filter, flexible.metric, flexible.value, flexible.n) == ("flexible-extract", "exact_match", 0.5, 8)
    assert flexible.stderr == pytest.approx((0.25 / 7) ** 0.5)
    assert flexible.unparsed == 0.25
    assert report.truncated == 0.25
    assert report.finish_reasons == {"stop": 6, "length": 2}
    assert report.max_new_tokens == 256
    assert report.record.metrics["accept_length"] == 2.5
    assert report.record.metrics["accept_rate"] == 3 / 8


def test_row_per_question(report: Any) -> None:
    assert [row["doc_id"] for row in report.questions] == list(range(8))
    right, loose, none, endless = report.questions[:4]
    assert right["question"] == "Question: What comes before 101? #100\nAnswer:"
    assert right["target"] == "One less.\n#### 100"
    assert right["text"] == " ok\n#### 100\n\n"
    assert right["token_ids"] == list(b" ok\n#### 100\n\n")
    assert right["filtered"] == {"strict-match": "100", "flexible-extract": "100"}
    assert right["scores"] == {"strict-match": {"exact_match": 1.0}, "flexible-extract": {"exact_match": 1.0}}
    assert loose["filtered"] == {"strict-match": "[invalid]", "flexible-extract": "101."}
    assert loose["scores"]["flexible-extract"] == {"exact_match": 1.0}
    assert none["filtered"]["flexible-extract"] == "[invalid]"
    assert endless["scores"]["flexible-extract"] == {"exact_match": 0.0}
    assert (right["finish_reason"], endless["finish_reason"]) == ("stop", "length")
    assert [row["ttft_s"] for row in report.questions] == [0.5 + place for place in range(8)]
    assert right["accept_length"] == 2.5
    assert len({row["prompt_hash"] for row in report.questions}) == 8


def test_output_files(report: Any, report_folder: Path) -> None:
    names = {path.name for path in report_folder.iterdir()}
    assert names == {"fake", "questions.jsonl", "record.json", "requests.jsonl", "summary.csv", "summary.md"}
    assert lines(report_folder / "questions.jsonl") == report.questions
    workload = json.loads((report_folder / "record.json").read_text())["workload"]
    assert (workload["command"], workload["task"], workload["num_fewshot"]) == ("eval", "gsm8k", 5)
    assert workload["prompts_sha256"] == report.prompts_sha256


DRAWING = """
import random
import numpy
from datasets import Dataset, DatasetDict
def splits(**_):
    return DatasetDict(test=Dataset.from_list([{"q": str(n), "a": str(n)} for n in range(3)]))
def text(doc):
    return f"{doc['q']} {random.random()} {numpy.random.random()}"
"""


def test_random_choices_of_a_task_are_those_of_lm_eval(make_engine: Any, tasks_folder: Path, no_env_info: None) -> None:
    """In every run. lm-eval seeds once, before it loads the tasks, which draw then, too."""
    import lm_eval.evaluator

    from specbatch.evals.lm import SpecBatchLM

    (tasks_folder / "drawing.py").write_text(DRAWING)
    keys = "custom_dataset: !function drawing.splits\ndoc_to_text: !function drawing.text\ndoc_to_target: a"
    (tasks_folder / "drawing.yaml").write_text(f"task: drawing\n{keys}\ntest_split: test\n")
    theirs, ours = make_engine(lambda prompt: "1"), make_engine(lambda prompt: "1")
    manager = lm_eval.tasks.TaskManager(include_path=tasks_folder, include_defaults=False)
    lm_eval.simple_evaluate(SpecBatchLM(theirs, "drawing"), tasks=["drawing"], task_manager=manager)
    ready = prepare(EvalOptions("drawing"))
    for _ in range(2):
        ready.run(ours)
    assert [call["prompts"] for call in ours.calls] == [theirs.calls[0]["prompts"]] * 2


def test_limit_takes_the_first_questions(report: Any, evaluate: Any) -> None:
    part = evaluate(limit=3)
    hashes = [row["prompt_hash"] for row in report.questions]
    assert [row["prompt_hash"] for row in part.questions] == hashes[:3]
    assert [score.n for score in part.scores] == [3, 3]
    assert part.limit == 3


def test_templates_are_compiled_once(evaluate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from jinja2.sandbox import SandboxedEnvironment
    from lm_eval import utils

    compiled, env, from_string = [], utils.env, SandboxedEnvironment.from_string
    monkeypatch.setattr(
        SandboxedEnvironment, "from_string", lambda self, text: (compiled.append(text), from_string(self, text))[1]
    )
    evaluate(num_fewshot=0)
    assert 0 < len(compiled) <= 3 * len(set(compiled)), "once each to prepare, to run and to report"
    assert utils.env is env


def test_one_question_has_no_standard_error(evaluate: Any) -> None:
    report = evaluate(limit=1)
    assert [(score.value, score.stderr) for score in report.scores] == [(1.0, None), (1.0, None)]
    json.dumps(report.as_dict())


def test_several_answers_to_one_question(make_engine: Any, evaluate: Any) -> None:
    engine = make_engine(lambda prompt: " The answer is 100.")
    report = evaluate("gsm8k_cot_self_consistency", engine=engine, limit=2, max_new_tokens=40)
    assert [row["repeat"] for row in report.questions] == [*range(64)] * 2
    assert [row["doc_id"] for row in report.questions] == [0] * 64 + [1] * 64
    assert {params.temperature for params in engine.calls[0]["params"]} == {0.2}
    majority = next(score for score in report.scores if score.filter == "maj@64")
    assert (majority.value, majority.n) == (0.5, 2)


def test_chat_template(make_engine: Any, evaluate: Any) -> None:
    engine = make_engine(lambda prompt: " 1")
    report = evaluate(engine=engine, chat_template=True, num_fewshot=2)
    prompt = engine.calls[0]["prompts"][0]
    assert prompt.count(256) == 1
    assert prompt.count(257) == 2 * 2 + 2  # two examples as turns, the question, the answer
    assert report.chat_template
    engine.tokenizer.has_chat_template = False
    with pytest.raises(SpecbatchError, match="chat_template=True: the model's tokenizer has no chat template"):
        evaluate(engine=engine, chat_template=True)


def test_progress_concurrency_and_partial_answers(
    tmp_path: Path, make_engine: Any, mixed_reply: Any, evaluate: Any
) -> None:
    engine, partial = make_engine(mixed_reply), tmp_path / "out" / "answers.partial.jsonl"
    seen: list[tuple[int, int, int]] = []

    def progress(done: int, wanted: int) -> None:
        seen.append((done, wanted, len(lines(partial)) - 1))  # after the settings

    report = evaluate(engine=engine, progress=progress, concurrency=2, max_new_tokens=5, output=tmp_path / "out")
    assert seen == [(place, 8, place) for place in range(1, 9)], "answers are on disk as soon as they finish"
    assert engine.calls[0]["concurrency"] == 2
    assert report.max_new_tokens == 5


@pytest.mark.parametrize(
    ("finished", "message"),
    [
        (3, r"kept the finished answers \(3\) in {}/answers.partial.jsonl; the same command with this --out continues"),
        (0, ""),
    ],
)
def test_interrupted_run_keeps_finished_answers(
    tmp_path: Path, make_engine: Any, mixed_reply: Any, evaluate: Any, finished: int, message: str
) -> None:
    output, engine = tmp_path / "out", make_engine(mixed_reply)
    engine.stop_after = finished
    with pytest.raises(KeyboardInterrupt, match=f"^{message.format(output)}$"):
        evaluate(engine=engine, output=output)
    assert [path.name for path in output.iterdir()] == ["answers.partial.jsonl"] * (finished > 0)
    if finished:
        settings, *kept = lines(output / "answers.partial.jsonl")
        assert (settings["task"], settings["num_fewshot"]) == ("gsm8k", 5)
        assert [(row["index"], row["doc_id"]) for row in kept] == [(7, 7), (6, 6), (5, 5)]
        text = " it is 105."
        assert (kept[2]["text"], kept[2]["token_ids"]) == (text, list(text.encode()))
        assert kept[2]["finish_reason"] == "stop"


def test_output_folder_is_new_or_empty_and_writable(tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "old.txt").write_text("kept")
    for output, complaint in (
        (full, "exists and is not empty"),
        (full / "old.txt", "cannot be written"),
        (full / "old.txt" / "out", "cannot be written"),
    ):
        with pytest.raises((SpecbatchError, UnwritableError)) as refused:
            prepare(EvalOptions("one_digit_sums", output=output))
        assert str(output) in str(refused.value)
        assert complaint in str(refused.value)
    assert (full / "old.txt").read_text() == "kept"
    (tmp_path / "empty").mkdir()
    prepare(EvalOptions("one_digit_sums", output=tmp_path / "empty"))


def test_options_replace_the_tasks_sampling(
    make_engine: Any, evaluate: Any, mixed_reply: Any, report: Any, tmp_path: Path
) -> None:
    engine = make_engine(mixed_reply)
    found = evaluate(engine=engine, temperature=0.6, top_k=20, limit=2, output=tmp_path / "sampled")
    params = engine.calls[0]["params"]
    assert [(one.temperature, one.top_k, one.top_p) for one in params] == [(0.6, 20, 1.0)] * 2
    assert len({one.seed for one in params}) == 2
    sampling = {"temperature": 0.6, "top_p": 1.0, "top_k": 20, "min_p": 0.0}
    assert found.record.workload["sampling"] == found.as_dict()["sampling"] == sampling
    assert "Answers: up to 256 tokens, temperature 0.6, top-k 20, seed 0." in found.table()
    assert EvalReport.load(tmp_path / "sampled") == found
    assert report.sampling is None
    assert "Answers: up to 256 tokens, greedy." in report.table()


def test_examples_as_turns_or_as_text_and_a_system_instruction(make_engine: Any, evaluate: Any) -> None:
    def prompt(**options: Any) -> tuple[str, Any]:
        engine = make_engine(lambda prompt: " 1")
        engine.tokenizer.apply_chat_template = lambda messages, **_: json.dumps(messages)
        found = evaluate(engine=engine, num_fewshot=2, limit=1, **options)
        return engine.tokenizer.decode(engine.calls[0]["prompts"][0]), found

    text, plain = prompt(system_instruction="Be brief.")
    assert text.startswith("Be brief.Question: ")
    assert "Prompts: plain text, system instruction 'Be brief.', sha256" in plain.table()
    text, turns = prompt(chat_template=True, system_instruction="Be brief.")
    assert [turn["role"] for turn in json.loads(text)] == ["system", *["user", "assistant"] * 2, "user"]
    assert json.loads(text)[0]["content"] == "Be brief."
    assert turns.as_dict()["fewshot_as_multiturn"]
    text, one = prompt(chat_template=True, fewshot_as_multiturn=False)
    ((role, content),) = (tuple(turn.values()) for turn in json.loads(text))
    assert (role, content.count("Question:")) == ("user", 3)
    assert "Prompts: chat template, examples in one turn, sha256" in one.table()


def test_an_interrupted_run_continues_with_the_same_options_only(
    make_engine: Any, evaluate: Any, tmp_path: Path
) -> None:
    engine = make_engine(lambda prompt: " 1")
    engine.stop_after = 1
    options = {"output": tmp_path / "out", "num_fewshot": 0, "limit": 3}
    with pytest.raises(KeyboardInterrupt):
        evaluate(engine=engine, **options)
    settings = lines(tmp_path / "out" / "answers.partial.jsonl")[0]
    assert settings["default_max_new_tokens"] == 256
    assert not settings.keys() & {"gen_kwargs", "add_bos_token", "truncate_prompts"}, "defaults are left out"
    engine.stop_after = None
    for name, value in (
        ("gen_kwargs", "top_k=0"),
        ("add_bos_token", False),
        ("truncate_prompts", True),
        ("system_instruction", "x"),
    ):
        with pytest.raises(SpecbatchError, match=name):
            evaluate(engine=engine, **options, **{name: value})
    assert len(evaluate(engine=engine, **options).questions) == 3


def test_prompts_that_are_too_long_are_found_before_the_model_is_loaded(
    scored_file: Path, byte_checkpoint: None
) -> None:
    engine = Unloaded(EngineConfig(max_model_len=300))
    with pytest.raises(SpecbatchError, match=r"^max_model_len=300: .* truncate_prompts drops the beginning"):
        prepare(EvalOptions("gsm8k", data=scored_file)).check_lengths(engine)
    prepare(EvalOptions("gsm8k", data=scored_file, truncate_prompts=True)).check_lengths(engine)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        *(("limit", value) for value in (0, -1, 2.5, True, float("nan"))),
        ("num_fewshot", -1),
        ("max_new_tokens", 0),
        ("concurrency", 0),
        ("offset", -1),
        ("bootstrap_iters", -1),
    ],
)
def test_invalid_options_are_refused(setting: str, value: object) -> None:
    with pytest.raises(SpecbatchError, match=rf"^{setting}={value!r}: use a whole number of at least"):
        EvalOptions("gsm8k", **{setting: value})  # type: ignore[arg-type]


def test_nothing_is_printed_or_logged(capfd: pytest.CaptureFixture[str], evaluate: Any) -> None:
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda entry: logged.append(entry.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        evaluate()
    finally:
        logger.removeHandler(handler)
    assert (capfd.readouterr(), logged) == (("", ""), [])
    assert logger.level == level
