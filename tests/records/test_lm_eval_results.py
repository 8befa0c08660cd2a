"""Files of another engine in `compare` and `gate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lm_eval_run import samples_of, write_run
from typer.testing import CliRunner, Result

from specbatch.cli.app import app
from specbatch.errors import SpecbatchError
from specbatch.evals.gate.gate import run_gate
from specbatch.records.lm_eval_results import ResultsFile
from specbatch.sweeps.report.compare import compare

RIGHT = [1.0, 1.0, 0.0, 1.0]
WORSE = [1.0, 0.0, 0.0, 0.0]


def call(*words: Any) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "1000"})


def refused(*words: Any) -> str:
    result = call(*words)
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    return line


def file_of(path: Path) -> ResultsFile:
    found = ResultsFile.find("run", path)
    assert found is not None
    return found


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    path = tmp_path / "policy.toml"
    path.write_text('[accuracy]\nfilter = "none"\nmetric = "acc"\n')
    return path


def test_two_engines_are_paired_by_question(tmp_path):
    write_run(tmp_path / "a" / "org__m", {"t": samples_of(RIGHT)})
    write_run(tmp_path / "b" / "org__m", {"t": samples_of(WORSE)}, engine="vllm")
    found = compare(tmp_path / "a", tmp_path / "b")
    (row,) = found.rows
    assert (row.before, row.after, row.over) == (0.75, 0.25, "4 questions, paired: 2 lost, 0 gained, p = 0.5")
    assert found.differs == {"b": {"engine": ["hf -> vllm"]}}
    lines = [line for line in found.notes if line.startswith("ANSWERS ONLY")]
    assert lines == [
        f"ANSWERS ONLY: {tmp_path}/{name} ({engine}): lm-eval's files have no times and no accept lengths"
        for name, engine in (("a", "hf"), ("b", "vllm"))
    ]
    assert call("compare", tmp_path / "a", tmp_path / "b", "--json").exit_code == 0


def test_the_file_or_its_folder_and_the_newest_of_several(tmp_path):
    old = write_run(tmp_path, {"t": samples_of(WORSE)})
    new = write_run(tmp_path, {"t": samples_of(RIGHT)}, date="2026-01-02T03-04-06")
    assert file_of(tmp_path).path == new
    assert file_of(old).path == old
    assert [score.value for score in file_of(old).answers("t").scores] == [0.25]
    assert ResultsFile.find("run", tmp_path / "none") is None
    assert ResultsFile.find("run", tmp_path / "samples.jsonl") is None


def test_a_name_of_the_results_file_of_the_user(tmp_path):
    path = write_run(tmp_path, {"t": samples_of(RIGHT)})
    path.rename(tmp_path / path.name.replace("results", "mine"))
    assert len(file_of(tmp_path).answers("t").questions) == 4


def test_several_models_are_refused(tmp_path):
    for name in ("org__a", "org__b"):
        write_run(tmp_path / name, {"t": samples_of(RIGHT)})
    line = refused("compare", tmp_path, tmp_path)
    assert "holds results of lm-eval in org__a, org__b; name one of them" in line


def test_tasks_that_both_have(tmp_path, policy):
    write_run(tmp_path / "a", {"t": samples_of(RIGHT), "u": samples_of(RIGHT), "v": samples_of(RIGHT)})
    write_run(tmp_path / "b", {"t": samples_of(WORSE), "u": samples_of(RIGHT)})
    write_run(tmp_path / "c", {"w": samples_of(RIGHT)})
    found = compare(tmp_path / "a", tmp_path / "b")
    assert {row.section: row.after for row in found.rows} == {"t": 0.25, "u": 0.75}
    assert f"ONLY IN {tmp_path}/a: v" in found.notes
    line = refused("compare", tmp_path / "a", tmp_path / "c")
    assert "have no task in common: t; u; v, and w; compare evaluations of the same task" in line
    result = run_gate(policy, tmp_path / "b", tmp_path / "a")
    assert {check.point for check in result.checks} == {"t", "u", "v"}
    assert [(check.name, check.point) for check in result.failed] == [("measured", "v")]
    with pytest.raises(SpecbatchError, match="lacks v; measure it there too"):
        run_gate(policy, tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("missing", [True, False])
def test_other_prompts_are_refused(missing, tmp_path):
    write_run(tmp_path / "a", {"t": samples_of(RIGHT)})
    rows = samples_of(RIGHT)
    if missing:
        del rows[1:3]
    else:
        rows[1]["prompt_hash"] = rows[2]["prompt_hash"] = "other"
    write_run(tmp_path / "b", {"t": rows})
    line = refused("compare", tmp_path / "a", tmp_path / "b")
    expected = "the prompt of question 1 and 1 other differs or is missing in one run"
    assert line == f"error: the answers cannot be paired: {expected}"


def test_filters_repeats_and_metrics_that_are_not_right_or_wrong(tmp_path):
    rows = samples_of(RIGHT, "strict", "exact_match") + samples_of(WORSE, "loose", "exact_match")
    for row in rows:
        row |= {"resps": [["a", "b", "c"]], "metrics": ["exact_match", "f1"], "f1": 0.25 + row["exact_match"] / 2}
    write_run(tmp_path, {"t": rows}, higher_is_better={"t": {"exact_match": True, "f1": False}})
    answers = file_of(tmp_path).answers("t")
    assert [(score.filter, score.metric, score.better, score.n, score.stderr) for score in answers.overall] == [
        ("strict", "exact_match", "higher", 4, None),
        ("strict", "f1", "lower", 4, None),
        ("loose", "exact_match", "higher", 4, None),
        ("loose", "f1", "lower", 4, None),
    ]
    assert answers.questions[1]["scores"]["loose"] == {"exact_match": 0.0, "f1": 0.25}
    rows = {row.metric: row for row in compare(tmp_path, tmp_path).rows}
    assert rows["strict f1"].over == "not right or wrong"
    assert rows["loose exact_match"].over.startswith("4 questions, paired")


def test_perplexity(tmp_path):
    rows = samples_of(RIGHT, metric="word_perplexity")
    for row in rows:
        row["word_perplexity"] = [-12.5, 3]
    results = {"wiki": {"sample_len": 4, "word_perplexity,none": 8.5, "word_perplexity_stderr,none": "N/A"}}
    ways = {"wiki": {"word_perplexity": False}}
    write_run(tmp_path, {"wiki": rows}, results=results, higher_is_better=ways)
    (row,) = compare(tmp_path, tmp_path).rows
    assert (row.before, row.better, row.ratio, row.over) == (8.5, "lower", 1.0, "not right or wrong")


def test_a_group_is_one_evaluation(tmp_path):
    parts = {"part_b": samples_of(RIGHT), "part_a": samples_of(WORSE)}
    group = {"group_subtasks": {"both": ["sub"], "sub": ["part_a", "part_b"]}}
    path = write_run(tmp_path, parts, **group)
    body = json.loads(path.read_text())
    body["results"]["both"] = {"alias": "both", "acc,none": 0.5, "acc_stderr,none": 0.1, " ": " "}
    body["results"]["sub"] = {"alias": " - sub", "acc,none": " "}
    path.write_text(json.dumps(body))
    found = file_of(tmp_path)
    assert found.tasks == ["both"]
    answers = found.answers("both")
    (score,) = answers.overall
    assert (score.value, score.stderr, score.n) == (0.5, 0.1, 8)
    assert [row["doc_id"] for row in answers.questions] == list(range(8))
    verdicts = [row["scores"]["none"]["acc"] for row in answers.questions]
    assert verdicts == RIGHT + WORSE  # in the order in which lm-eval loaded them


def test_older_versions(tmp_path):
    """0.4.3 and 0.4.5 name neither filter nor metrics, and have no sample_len; 0.4.2 has no hashes."""
    path = write_run(tmp_path, {"t": samples_of(RIGHT)})
    body = json.loads(path.read_text())
    del body["results"]["t"]["sample_len"]
    body |= {"group_subtasks": {"t": []}, "lm_eval_version": "0.4.5"}
    path.write_text(json.dumps(body))
    samples = next(tmp_path.glob("samples_*"))
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    for row in rows:
        del row["filter"], row["metrics"]
    samples.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (row,) = compare(tmp_path, tmp_path).rows
    assert (row.metric, row.before) == ("none acc", 0.75)
    body["results"]["t"]["acc,other"] = 0.5
    path.write_text(json.dumps(body))
    assert "was written by lm-eval 0.4.5, and its answers name no filter" in refused("compare", tmp_path, tmp_path)
    for row in rows:
        del row["prompt_hash"]
    samples.write_text("".join(json.dumps(row) + "\n" for row in rows))
    line = refused("compare", tmp_path, tmp_path)
    assert "prompt_hash is missing" in line
    assert "of version 0.4.7 or later" in line


def test_gate(tmp_path, policy):
    write_run(tmp_path / "a", {"t": samples_of([1.0] * 20)})
    write_run(tmp_path / "b", {"t": samples_of([0.0] * 10 + [1.0] * 10)})
    assert run_gate(policy, tmp_path / "a", tmp_path / "a").passed
    result = run_gate(policy, tmp_path / "b", tmp_path / "a")
    assert [check.name for check in result.failed] == ["accuracy none acc has not fallen"]
    assert [check.found for check in result.checks if check.name == "requests finished"] == ["20"]
    for rule, says in (
        ("[answers]\nequal = true\n", "equal=True: lm-eval's files of hf have no token ids; leave [answers] out"),
        ("[accuracy]\nunparsed_at_most = 0.1\n", "unparsed_at_most=0.1: lm-eval's files have no share of unparsed"),
    ):
        policy.write_text(rule)
        assert says in refused("gate", tmp_path / "a", "--policy", policy, "--baseline", tmp_path / "a")
    policy.write_text("[bounds]\naccept_length = { at_least = 2.0 }\n")
    (failed,) = run_gate(policy, tmp_path / "a").failed
    assert failed.found == "not measured"


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("results", "{", "is not JSON (Expecting property name enclosed in double quotes"),
        ("results", "[]", "use an object"),
        ("results", '{"results": {}}', "configs is missing"),
        ("results", '{"results": {}, "configs": {}, "n-samples": {}}', "n-samples={}: it must not be empty"),
        ("samples", '{"doc_id": 0, "prompt_hash": "prompt 0", "fil', "is not JSON (Unterminated string"),
        ("samples", '{"doc_id": -1, "prompt_hash": "p"}\n', "doc_id=-1: use at least 0"),
        ("samples", "", "has 0 answers of 4"),
        ("samples", json.dumps(samples_of(RIGHT)[0]) + "\n", "has 1 answer of 4"),
        ("samples", 2 * "".join(json.dumps(row) + "\n" for row in samples_of(RIGHT)), "answer to question 0 twice"),
        ("samples", None, "is not there: answers are compared question by question, so run lm-eval with --log_samples"),
    ],
)
def test_damaged_files_are_refused_in_one_line(name, text, says, tmp_path):
    write_run(tmp_path, {"t": samples_of(RIGHT)})
    (path,) = tmp_path.glob(f"{name}_*")
    path.unlink() if text is None else path.write_text(text)
    line = refused("compare", tmp_path, tmp_path)
    assert says in line
    assert path.name in line
    assert line.startswith("error: BASE=")


def test_a_group_that_does_not_aggregate_its_tasks(tmp_path):
    write_run(tmp_path, {"t": samples_of(RIGHT)}, group_subtasks={"all": ["t"]})
    assert "it is a group without an own score" in refused("compare", tmp_path, tmp_path)


def test_answers_without_scores(tmp_path, policy):
    write_run(tmp_path / "a", {"t": samples_of([999.0] * 3, metric="bypass")})
    assert file_of(tmp_path / "a").answers("t").scores == []
    assert "have no metric in common" in refused("compare", tmp_path / "a", tmp_path / "a")
    with pytest.raises(SpecbatchError, match="was not scored"):
        run_gate(policy, tmp_path / "a", tmp_path / "a")


@pytest.mark.parametrize("value", ["3", None, 10**400, float("nan"), [1], True])
def test_values_that_are_no_scores_are_left_out(value, tmp_path):
    results = {"t": {"sample_len": value, "acc,none": value, "f1,none": 0.5, "f1_stderr,none": value}}
    write_run(tmp_path, {"t": samples_of(RIGHT)}, results=results)
    (score,) = file_of(tmp_path).answers("t").scores
    assert (score.metric, score.stderr) == ("f1", None)


def test_foreign_json_and_folders_are_refused(tmp_path):
    (tmp_path / "x.json").write_text('{"a": 1}')
    assert "x.json': results is missing" in refused("compare", tmp_path / "x.json", tmp_path / "x.json")
    assert "holds no record.json" in refused("compare", tmp_path, tmp_path)
