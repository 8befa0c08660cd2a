"""The files that lm-eval's tools read: keys and types are those of lm-eval 0.4.13, and its functions open them."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from types import NoneType
from typing import Any

import lm_eval.utils
import numpy
import pandas
import pytest

from specbatch.errors import SpecbatchError
from specbatch.evals import lm_eval_files
from specbatch.evals.gate.gate import run_gate
from specbatch.evals.options import EvalOptions
from specbatch.files.atomic_file import UnwritableError
from specbatch.sweeps.report.compare import compare

# As `lm_eval run --model hf --log_samples --output_path` of lm-eval 0.4.13 writes them, without a chat template.
KEYS = {
    "results": dict, "group_subtasks": dict, "configs": dict, "versions": dict, "n-shot": dict,
    "higher_is_better": dict, "n-samples": dict, "config": dict, "git_hash": (str, NoneType), "date": float,
    "pretty_env_info": str, "transformers_version": str, "lm_eval_version": str, "upper_git_hash": (str, NoneType),
    "tokenizer_pad_token": list, "tokenizer_eos_token": list, "tokenizer_bos_token": list, "eot_token_id": int,
    "max_length": int, "task_hashes": dict, "model_source": str, "model_name": str, "model_name_sanitized": str,
    "system_instruction": NoneType, "system_instruction_sha": NoneType, "fewshot_as_multiturn": NoneType,
    "chat_template": NoneType, "chat_template_sha": NoneType, "total_evaluation_time_seconds": str,
}  # fmt: skip
OF_CONFIG = {
    "model": str, "model_args": dict, "model_dtype": str, "batch_size": (int, NoneType), "batch_sizes": list,
    "device": str, "use_cache": NoneType, "limit": (int, NoneType), "bootstrap_iters": int, "gen_kwargs": dict,
    "random_seed": int, "numpy_seed": int, "torch_seed": int, "fewshot_seed": int,
}  # fmt: skip
OF_SAMPLE = {
    "doc_id": int, "doc": dict, "target": str, "arguments": dict, "resps": list, "filtered_resps": list,
    "filter": str, "metrics": list, "doc_hash": str, "prompt_hash": str, "target_hash": str, "exact_match": float,
}  # fmt: skip


def files_of(folder: Path) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
    """The results and the samples by task."""
    names = [str(path) for path in folder.rglob("*")]
    (results,) = lm_eval.utils.get_results_filenames(names)
    samples = {}
    for name in lm_eval.utils.get_sample_results_filenames(names):
        assert lm_eval.utils.get_file_datetime(name) == lm_eval.utils.get_file_datetime(results).removesuffix(".json")
        rows = [json.loads(line) for line in Path(name).read_text().splitlines()]
        samples[lm_eval.utils.get_file_task_name(Path(name).name)] = rows
    return json.loads(Path(results).read_text()), samples


def differing(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    return [name for name, kind in expected.items() if name not in found or not isinstance(found[name], kind)]


def test_keys_and_types_are_those_of_lm_eval(report, report_folder):
    results, samples = files_of(report_folder)
    assert set(results) == set(KEYS)
    assert not differing(results, KEYS)
    assert not differing(results["config"], OF_CONFIG)
    assert list(samples) == ["gsm8k"]
    for row in samples["gsm8k"]:
        assert set(row) == set(OF_SAMPLE)
        assert not differing(row, OF_SAMPLE)
    assert len(samples["gsm8k"]) == 2 * 8  # filters
    assert samples["gsm8k"][0]["arguments"]["gen_args_0"]["arg_1"]["until"]
    assert results["tokenizer_bos_token"] == ["<s>", "256"]
    assert results["tokenizer_pad_token"] == [None, "None"]
    assert results["n-samples"] == {"gsm8k": {"original": 8, "effective": 8}}
    assert len(results["task_hashes"]["gsm8k"]) == 64
    assert results["model_name"] == results["config"]["model_args"]["pretrained"] == "fake"
    assert results["config"]["accept_length"] == report.record.metrics["accept_length"]


def test_functions_of_lm_eval_and_others_open_the_files(report, report_folder, tmp_path):
    results, samples = files_of(report_folder)
    score = next(score.value for score in report.scores if score.filter == "flexible-extract")
    assert f"|exact_match|↑  | {score:.2f}|±  |" in lm_eval.utils.make_table(results)
    (path,) = report_folder.glob("fake/samples_gsm8k_*.jsonl")
    table = pandas.read_json(path, lines=True)
    strict = table[table["filter"] == "flexible-extract"]
    assert strict["exact_match"].mean() == score
    assert list(table.columns) == list(samples["gsm8k"][0])

    from datasets import load_dataset

    rows = load_dataset("json", data_files=str(path), split="train", cache_dir=str(tmp_path))
    assert rows["prompt_hash"] == list(table["prompt_hash"])


def test_answers_are_those_of_the_report(report, report_folder):
    _, samples = files_of(report_folder)
    for row in samples["gsm8k"]:
        ours = report.questions[row["doc_id"]]
        assert row["prompt_hash"] == ours["prompt_hash"]
        assert row["filtered_resps"][0] == ours["filtered"][row["filter"]]
        assert {"exact_match": row["exact_match"]} == ours["scores"][row["filter"]]


def test_commands_read_the_folder_as_before(report, report_folder):
    assert "8 questions, paired: 0 lost" in compare(report_folder, report_folder).markdown()


def test_an_interrupted_run_writes_the_same_files(evaluate, make_engine, mixed_reply, report_folder, report, tmp_path):
    engine = make_engine(mixed_reply)
    engine.stop_after = 3
    with pytest.raises(KeyboardInterrupt):
        evaluate(engine=engine, output=tmp_path / "out")
    assert not list((tmp_path / "out").rglob("results_*"))
    engine.stop_after = None
    evaluate(engine=engine, output=tmp_path / "out")
    (ours, ours_samples), (theirs, their_samples) = files_of(tmp_path / "out"), files_of(report_folder)
    assert ours_samples == their_samples
    assert ours["results"] == theirs["results"]
    assert ours["task_hashes"] == theirs["task_hashes"]
    evaluate(engine=engine, output=tmp_path / "out")  # complete: nothing is written
    assert len(list((tmp_path / "out").rglob("results_*"))) == 1


def test_chat(evaluate, tmp_path, monkeypatch, make_engine, mixed_reply):
    engine = make_engine(mixed_reply)
    engine.tokenizer.chat_template = "{{ messages }}"
    evaluate(engine=engine, output=tmp_path, chat_template=True)
    results, _ = files_of(tmp_path)
    assert results["chat_template"] == "{{ messages }}"
    assert results["chat_template_sha"] == lm_eval.utils.hash_string("{{ messages }}")
    assert results["fewshot_as_multiturn"] is True


def test_tasks_that_score_texts(evaluate, tmp_path):
    evaluate("one_digit_choices", reply=lambda _: "3", output=tmp_path, limit=3)
    results, samples = files_of(tmp_path)
    assert results["n-samples"]["one_digit_choices"]["effective"] == 3
    row = samples["one_digit_choices"][0]
    assert row["arguments"]["gen_args_1"]["arg_1"]
    assert row["resps"][0][0][1] in ("True", "False")  # lm-eval writes them as text
    assert {"acc"} <= set(row)


def test_several_evaluations_are_one_run(report, report_folder, tmp_path):
    first = {"results": {"a": {"x,none": 1.0}}, "samples": {"a": []}, "groups": {"g": {"x,none": 1.0}}}
    second = {"results": {"b": {"x,none": numpy.float64(0.5)}, "a": {"x,none": 0.0}}, "samples": {"b": [], "a": []}}
    save = lm_eval_files.save_lm_eval_files
    tokenizer = type("Made", (), {"special_tokens": {}, "chat_template": None, "bos_id": None, "eos_id": None})()
    tokenizer.vocabulary = list
    save(tmp_path, [first, second], report.record, tokenizer, EvalOptions("a"), 0.0)
    results, samples = files_of(tmp_path)
    assert results["results"] == {"a": {"x,none": 1.0}, "b": {"x,none": 0.5}}
    assert results["groups"] == {"g": {"x,none": 1.0}}
    assert set(samples) == set(results["task_hashes"]) == {"a", "b"}


def test_values_that_json_cannot_hold_are_written_as_lm_eval_does():
    row = {
        "arguments": [("a", {"until": ["b"]})], "resps": [[(numpy.float64(-1.5), True)]], "filtered_resps": [None],
        "target": [1, 2], "doc": {"set": {1}, "bool": numpy.bool_(True)}, "perplexity": (float("inf"), 2),
    }  # fmt: skip
    made = lm_eval_files.sample_row(row)
    text = json.dumps(made, default=lm_eval.utils.handle_non_serializable)
    assert json.loads(text) == {
        "arguments": {"gen_args_0": {"arg_0": "a", "arg_1": {"until": ["b"]}}},
        "resps": [[["-1.5", "True"]]], "filtered_resps": ["None"], "target": "[1, 2]",
        "doc": {"set": [1], "bool": True}, "perplexity": [float("inf"), 2],
    }  # fmt: skip
    assert row["target"] == [1, 2]  # the rows of the report are the same objects


@pytest.mark.parametrize("model", [".", "..", "/models/" + "é/" * 200])
def test_any_path_of_a_model_has_a_folder_of_its_own(model, evaluate, tmp_path, make_engine, mixed_reply):
    engine = make_engine(mixed_reply)
    record = engine.record
    engine.record = lambda **settings: _named(record(**settings), model)
    evaluate(engine=engine, output=tmp_path / "out")
    (path,) = tmp_path.rglob("results_*.json")
    assert path.parent.parent == tmp_path / "out"


def _named(record: Any, model: str) -> Any:
    record.config["model"] = model
    return record


def test_a_disk_that_is_full_is_no_finished_run(evaluate, make_engine, mixed_reply, tmp_path, monkeypatch):
    def full(path: Path, content: str) -> None:
        raise UnwritableError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    engine = make_engine(mixed_reply)
    with monkeypatch.context() as patch:
        patch.setattr(lm_eval_files, "write_atomic", full)
        with pytest.raises(UnwritableError, match="samples_gsm8k"):
            evaluate(engine=engine, output=tmp_path / "out")
    calls = len(engine.calls)
    evaluate(engine=engine, output=tmp_path / "out")
    assert engine.calls[calls]["prompts"] == []  # all answers were kept
    files_of(tmp_path / "out")


def as_other_engine(folder: Path, place: Path) -> Path:
    """The files of a run as if another engine had answered, with question 0 the other way round."""
    place.mkdir()
    for path in folder.rglob("*_20*.json*"):
        text = path.read_text()
        if path.suffix == ".jsonl":
            first, *others = [json.loads(line) for line in text.splitlines()]
            text = "".join(
                json.dumps(row | ({"exact_match": 1.0 - row["exact_match"]} if row["doc_id"] == 0 else {})) + "\n"
                for row in (first, *others)
            )
        (place / path.name).write_text(text.replace('"model_source": "specbatch"', '"model_source": "vllm"'))
    return place


def test_another_engine_is_compared_by_question(report, report_folder, tmp_path):
    other = as_other_engine(report_folder, tmp_path / "other")
    for pair in ((report_folder, other), (other, report_folder)):
        found = compare(*pair)
        assert [row.metric for row in found.rows] == ["strict-match exact_match", "flexible-extract exact_match"]
        assert all(row.over.startswith("8 questions, paired: ") for row in found.rows)
        assert [line for line in found.notes if line.startswith("ANSWERS ONLY")] == [
            f"ANSWERS ONLY: {other} (vllm): lm-eval's files have no times and no accept lengths"
        ]
        assert found.differs[found.rows[0].run] == {}
    rule = '[accuracy]\nfilter = "strict-match"\nunparsed_at_most = 1.0\n'
    (tmp_path / "policy.toml").write_text(rule)
    result = run_gate(tmp_path / "policy.toml", report_folder, other)
    assert result.passed
    assert [len(test.lost) + len(test.gained) for test in result.tests] == [1]


def test_tasks_that_only_the_other_engine_has(report, report_folder, tmp_path):
    """A gate looks at the task that both have; a baseline of many tasks does not make a run incomplete."""
    other = as_other_engine(report_folder, tmp_path / "other")
    (results,) = other.glob("results_*")
    body = json.loads(results.read_text())
    body["n-samples"]["arc"] = {"original": 3, "effective": 3}
    results.write_text(json.dumps(body))
    (tmp_path / "policy.toml").write_text('[accuracy]\nfilter = "strict-match"\nunparsed_at_most = 1.0\n')
    result = run_gate(tmp_path / "policy.toml", report_folder, other)
    assert [check.name for check in result.checks if check.point != "gsm8k"] == []
    compared = compare(other, report_folder)
    assert f"ONLY IN {other}: arc" in compared.notes
    (tmp_path / "policy.toml").write_text('[accuracy]\nfilter = "strict-match"\n')
    assert {check.point for check in run_gate(tmp_path / "policy.toml", other, report_folder).checks} == {"gsm8k"}


def test_other_prompts_are_refused(report, report_folder, tmp_path, evaluate):
    other = as_other_engine(report_folder, tmp_path / "other")
    evaluate(output=tmp_path / "ours", num_fewshot=1)
    with pytest.raises(SpecbatchError, match="prompt of question 0 and 7 others differs or is missing in one run"):
        compare(other, tmp_path / "ours")


def test_the_files_of_several_tasks_are_one_run(evaluate, tmp_path, monkeypatch):
    parts = [tmp_path / "one", tmp_path / "two"]
    evaluate(output=parts[0])
    evaluate("one_digit_choices", reply=lambda _: "3", output=parts[1], limit=3)
    alone = [files_of(part) for part in parts]
    unlink = Path.unlink

    def killed(path: Path, **settings: Any) -> None:
        if path.parent.parent == parts[1]:
            raise KeyboardInterrupt
        unlink(path, **settings)

    monkeypatch.setattr(Path, "unlink", killed)
    with pytest.raises(KeyboardInterrupt):
        lm_eval_files.gather_lm_eval_files(tmp_path, parts)
    monkeypatch.undo()
    lm_eval_files.gather_lm_eval_files(tmp_path, parts)
    lm_eval_files.gather_lm_eval_files(tmp_path, parts)  # nothing is left to move
    results, samples = files_of(tmp_path)
    assert samples == alone[0][1] | alone[1][1]
    for name in ("results", "n-samples", "task_hashes", "configs"):
        assert results[name] == alone[0][0][name] | alone[1][0][name]
    assert set(results) == set(KEYS)
    assert "accept_length" not in results["config"]
    assert sorted(path.name for path in parts[0].iterdir()) == [
        "questions.jsonl", "record.json", "requests.jsonl", "summary.csv", "summary.md",
    ]  # fmt: skip


def test_a_task_that_a_finished_run_is_continued_with(evaluate, tmp_path):
    parts = [tmp_path / name for name in ("one_digit_choices", "gsm8k")]
    evaluate("one_digit_choices", reply=lambda _: "3", output=parts[0], limit=3)
    alone = files_of(parts[0])
    lm_eval_files.gather_lm_eval_files(tmp_path, parts[:1])
    evaluate(output=parts[1])
    added = files_of(parts[1])
    lm_eval_files.gather_lm_eval_files(tmp_path, parts)
    results, samples = files_of(tmp_path)  # one file
    assert samples == alone[1] | added[1]
    assert results["n-samples"] == alone[0]["n-samples"] | added[0]["n-samples"]
