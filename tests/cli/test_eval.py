"""`specbatch eval`: options, output, interruption."""

from __future__ import annotations

import json
import types
from pathlib import Path

import pytest

from specbatch.errors import refuse

TWICE = '{"gsm8k":[1],"gsm8k":[2]}'


@pytest.fixture
def evals(monkeypatch):
    """A stub evaluation of one question, which may be interrupted after it; holds its options."""
    from specbatch.evals import several

    seen = {"interrupt": False, "complete": False, "changed": False}

    class Report:
        def table(self):
            return "| exact_match | 0.5 |"

        def as_dict(self):
            return {"exact_match": 0.5}

        def score_cells(self):
            return [{"metric": "exact_match", "score": "0.5"}]

        flat = score_cells

        def details(self):
            return "fast"

    class Ready:
        def __init__(self, options):
            seen["options"] = self.options = options
            self.requests = 60
            self.task = types.SimpleNamespace(generates=True, data_source="some questions", warning="")

        def engine_config(self, config):
            return config

        def check_lengths(self, engine):
            seen["checked"] = engine.config

        def notes(self):
            return ["a note"]

        def finished(self, config):
            if seen["changed"]:
                raise refuse("output", "o", "was made with another --limit")

        def complete(self, config):
            return Report() if seen["complete"] else None

        def run(self, engine, progress=None, kept=None, log=None):
            seen["engine"] = engine.config
            progress(1, 2)
            if seen["interrupt"]:
                raise KeyboardInterrupt("kept 1 finished answers")
            (seen["options"].output / "summary.md").write_text(Report().table())
            return Report()

    monkeypatch.setattr(several, "prepare_several", lambda options: {name: Ready(options) for name in options.names})
    return seen


def test_options_reach_the_evaluation(run, evals, tmp_path):
    words = "--limit 3 --num-fewshot 2 --data d.jsonl --concurrency 7 --seed 9 --chat-template --no-thinking --spec v1"
    words += " --temperature 0.6 --top-k 20 --think-end-token </a> --offset 5 --bootstrap-iters 9 --predict-only"
    words += f" --write-out --confirm-run-unsafe-code --include-path {tmp_path}"
    words += " --no-fewshot-as-multiturn --no-add-bos-token"
    words += " --truncate-prompts --system-instruction brief --gen-kwargs until=Q:,top_p=1.0"
    words += " --max-new-tokens 11 --max-model-len 300"
    result = run("eval", "gsm8k", *words.split(), "--output", tmp_path / "o")
    assert result.exit_code == 0, result.output
    assert evals["checked"].max_model_len == 300
    assert "| exact_match | 0.5 |" in result.stdout
    engine = evals["engine"]
    assert (engine.speculation.algorithm, engine.speculation.schedule) == ("ngram", "v1")
    assert (engine.max_running, engine.seed) == (7, 9)
    assert vars(evals["options"]) == {
        "task": "gsm8k", "limit": 3, "num_fewshot": 2, "data": Path("d.jsonl"), "fewshot_data": None,
        "chat_template": True, "max_new_tokens": 11, "concurrency": 7, "seed": 1234, "output": tmp_path / "o",
        "thinking": False, "overwrite": False, "temperature": 0.6, "top_p": None, "top_k": 20, "min_p": None,
        "think_end_token": "</a>", "offset": 5, "samples": None, "include_path": (tmp_path,), "bootstrap_iters": 9,
        "predict_only": True, "write_out": True, "confirm_run_unsafe_code": True,
        "fewshot_as_multiturn": False, "add_bos_token": False, "truncate_prompts": True,
        "system_instruction": "brief", "gen_kwargs": "until=Q:,top_p=1.0",
    }  # fmt: skip


def test_json(run, evals):
    result = run("eval", "gsm8k", "--json")
    (line,) = result.stdout.splitlines()
    assert json.loads(line)["exact_match"] == 0.5
    assert Path(json.loads(line)["output"]).is_dir()


def test_interruption_reports_finished_answers(run, evals, tmp_path):
    evals["interrupt"] = True
    result = run("eval", "gsm8k", "--output", tmp_path / "o")
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-1] == "interrupted; kept 1 finished answers"
    assert "data: some questions" in result.stderr
    assert "note: a note" in result.stderr


def test_interruption_before_the_first_answer_leaves_no_folder(run, engine, evals, tmp_path):
    def interrupted():
        raise KeyboardInterrupt

    engine.entering = interrupted
    assert run("eval", "gsm8k", "--output", tmp_path / "o").exit_code == 130
    assert not (tmp_path / "o").exists()


def test_complete_evaluation_is_shown_again(run, engine, evals, tmp_path):
    evals["complete"] = True
    result = run("eval", "gsm8k", "--out", tmp_path / "out")
    assert (result.exit_code, engine.built) == (0, []), result.output
    assert "out is complete: an earlier run has finished this evaluation" in result.stderr
    assert "| exact_match | 0.5 |" in result.stdout


def test_changed_options_are_refused_before_the_model_is_loaded(run, engine, evals, tmp_path):
    evals["changed"] = True
    result = run("eval", "gsm8k", "arc_easy", "--out", tmp_path / "out")
    assert (result.exit_code, engine.built) == (2, [])
    assert "was made with another --limit" in result.stderr


def test_several_tasks_share_the_model_and_a_table(run, engine, evals, tmp_path):
    words = ("--samples", '{"gsm8k": [3, 1]}', "--include-path", tmp_path, "--include-path", tmp_path / "other")
    result = run("eval", "gsm8k", "arc_easy,one_digit_sums", *words, "--out", tmp_path / "out")
    assert (result.exit_code, len(engine.built)) == (0, 1), result.output
    assert evals["options"].names == ["gsm8k", "arc_easy", "one_digit_sums"]
    assert evals["options"].samples == {"gsm8k": [3, 1]}
    assert evals["options"].include_path == (tmp_path, tmp_path / "other")
    assert "arc_easy: data: some questions" in result.stderr
    assert result.stdout.count("exact_match") == 3
    assert (tmp_path / "out/summary.md").read_text().count("## ") == 3
    both = run("eval", "gsm8k", "arc_easy", "--json").stdout
    assert {*json.loads(both)["tasks"]} == {"gsm8k", "arc_easy"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("gsm8k gsm8k", "task='gsm8k,gsm8k': gsm8k is given twice"),
        ("gsm8k --samples [1]", "--samples='[1]': use JSON or the path of a JSON file, such as"),
        ("gsm8k --samples nothing.json", "--samples='nothing.json': cannot be read"),
        (f"gsm8k --samples {TWICE}", f'--samples={TWICE!r}: has the key "gsm8k" more than once'),
        ('gsm8k --samples {"gsm8k"', "--samples='{\"gsm8k\"': is not JSON (Expecting"),
        ("gsm8k --limit 1.5", "--limit=1.5: use a whole number of at least 1, or a share between 0 and 1"),
        (
            "one_digit_sums --configs v1 --predict-only",
            "--predict-only: goes with one configuration; leave it out",
        ),
    ],
)
def test_what_cannot_be_run_is_refused(run, engine, words, message):
    result = run("eval", *words.split())
    assert (result.exit_code, engine.built) == (2, [])
    assert result.stderr.startswith(f"error: {message}"), result.stderr
    (_,) = result.stderr.splitlines()
