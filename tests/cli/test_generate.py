"""`specbatch generate`: order, resume, atomic output, interruption."""

from __future__ import annotations

import fcntl
import json

import pytest

PROMPTS = [
    {"prompt": "a", "id": "first"},
    {"prompt_token_ids": [5, 6]},
    {"question": "b?"},
    {"prompt": "d", "id": 4},
]


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_keep_the_order_of_the_input(run, jsonl, tmp_path):
    result = run(
        "generate",
        jsonl(*PROMPTS),
        "-o",
        tmp_path / "deep" / "out.jsonl",
        "--max-new-tokens",
        3,
        "--spec",
        "v2",
    )
    assert result.exit_code == 0, result.output
    out = rows(tmp_path / "deep" / "out.jsonl")
    assert [row["index"] for row in out] == [0, 1, 2, 3]
    assert [row.get("id") for row in out] == ["first", None, None, 4]
    assert out[0]["text"] == "bcd"
    assert out[1]["token_ids"] == [7, 8, 9]
    assert out[0]["accept_length"] == 2.0
    assert out[0]["finish_reason"] == "length"
    assert not (tmp_path / "deep" / "out.jsonl.partial").exists()


def test_a_record_lies_beside_the_rows(run, jsonl, tmp_path):
    result = run("generate", jsonl(*PROMPTS), "-o", tmp_path / "out.jsonl", "--json")
    found = json.loads(result.stdout.splitlines()[-1])
    record = json.loads((tmp_path / "out.jsonl.record.json").read_text())
    assert found["record"] == str(tmp_path / "out.jsonl.record.json")
    assert record["metrics"] == found["metrics"]
    assert record["workload"]["command"] == "generate"
    assert len(record["workload"]["input_sha256"]) == 64


def test_json_is_the_only_line_on_stdout(run, jsonl, tmp_path):
    result = run("generate", jsonl(*PROMPTS), "-o", tmp_path / "out.jsonl", "--json")
    (line,) = result.stdout.splitlines()
    assert json.loads(line)["rows"] == 4
    assert "memory plan" in result.stderr


def test_messages_are_rendered_or_joined(run, jsonl, tmp_path):
    chat = {"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]}
    for flag, expected in [
        ("--chat-template", "<system>x<user>y<assistant>"),
        ("--no-chat-template", "x\n\ny"),
    ]:
        out = tmp_path / f"{flag}.jsonl"
        run("generate", jsonl(chat), "-o", out, flag)
        assert rows(out)[0]["prompt_tokens"] == len(expected)


def test_an_interrupted_run_keeps_what_is_finished_and_continues(run, engine, jsonl, tmp_path):
    out, source = tmp_path / "out.jsonl", jsonl(*PROMPTS)
    engine.interrupt_after = 2
    result = run("generate", source, "-o", out)
    assert result.exit_code == 130
    assert "interrupted; kept 2 finished of 4" in result.stderr
    assert not out.exists()
    partial = tmp_path / "out.jsonl.partial"
    assert {row["index"] for row in rows(partial)[1:]} == {2, 3}
    partial.write_text(partial.read_text() + '{"index": 0, "te')  # as a power cut leaves it

    engine.interrupt_after = None
    result = run("generate", source, "-o", out)
    assert result.exit_code == 0
    assert "2 of 4 are finished" in result.stderr
    assert len(engine.order) == 2  # two runs of the engine, the second for the missing rows only
    assert [row["index"] for row in rows(out)] == [0, 1, 2, 3]

    once = tmp_path / "once.jsonl"
    run("generate", source, "-o", once)
    assert once.read_text() == out.read_text()


def test_a_seed_belongs_to_the_row(run, engine, jsonl, tmp_path, monkeypatch):
    seen = []
    complete = engine._complete
    monkeypatch.setattr(
        engine, "_complete", lambda self, i, p, s: seen.append((p[0], s.seed)) or complete(self, i, p, s)
    )
    prompts = [{"prompt_token_ids": [number]} for number in range(1, 6)]
    run("generate", jsonl(*prompts), "-o", tmp_path / "whole.jsonl", "--temperature", 1)
    whole = dict(seen)
    seen.clear()
    engine.interrupt_after = 2
    run("generate", jsonl(*prompts), "-o", tmp_path / "parts.jsonl", "--temperature", 1)
    engine.interrupt_after = None
    run("generate", jsonl(*prompts), "-o", tmp_path / "parts.jsonl", "--temperature", 1)
    assert dict(seen) == whole
    assert len(set(whole.values())) == 5


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (["--temperature", "0.5"], "temperature (0.0 there, 0.5 now)"),
        (["--model", "other"], "model ('smollm2-135m' there, 'other' now)"),
        (["--spec", "v1"], "algorithm ('none' there, 'ngram' now)"),
        (["--no-chat-template"], "chat_template (True there, False now)"),
    ],
)
def test_another_job_is_not_continued(run, engine, jsonl, tmp_path, change, named):
    engine.interrupt_after = 1
    run("generate", jsonl(*PROMPTS), "-o", tmp_path / "out.jsonl")
    result = run("generate", jsonl(*PROMPTS), "-o", tmp_path / "out.jsonl", *change)
    assert result.exit_code == 2
    assert named in result.stderr
    assert result.stderr.count("\n") == 1


def test_another_input_is_not_continued(run, engine, jsonl, tmp_path):
    engine.interrupt_after = 1
    run("generate", jsonl(*PROMPTS), "-o", tmp_path / "out.jsonl")
    result = run("generate", jsonl(*PROMPTS[1:]), "-o", tmp_path / "out.jsonl")
    assert result.exit_code == 2
    assert "input file" in result.stderr


def test_running_options_may_change_on_resume(run, engine, jsonl, tmp_path):
    engine.interrupt_after = 1
    run("generate", jsonl(*PROMPTS), "-o", tmp_path / "out.jsonl")
    engine.interrupt_after = None
    assert run("generate", jsonl(*PROMPTS), "-o", tmp_path / "out.jsonl", "--concurrency", 2).exit_code == 0


def test_overwrite_replaces_a_finished_output(run, jsonl, tmp_path):
    out = tmp_path / "out.jsonl"
    run("generate", jsonl(*PROMPTS), "-o", out)
    assert run("generate", jsonl(PROMPTS[0]), "-o", out, "--overwrite").exit_code == 0
    assert len(rows(out)) == 1


@pytest.mark.parametrize("wrong", [["--max-running", "0"], ["--max-new-tokens", "300"]])
def test_overwrite_throws_nothing_away_before_the_job_is_checked(run, jsonl, tmp_path, wrong):
    out = tmp_path / "out.jsonl"
    run("generate", jsonl(*PROMPTS), "-o", out)
    before = out.read_text()
    assert run("generate", jsonl(*PROMPTS), "-o", out, "--overwrite", *wrong).exit_code == 2
    assert out.read_text() == before


def test_an_interrupted_overwrite_keeps_the_old_output_and_continues(run, engine, jsonl, tmp_path):
    out, source = tmp_path / "out.jsonl", jsonl(*PROMPTS)
    run("generate", source, "-o", out, "--max-new-tokens", 3)
    before = out.read_text()
    engine.interrupt_after = 2
    result = run("generate", source, "-o", out, "--overwrite")
    assert "the same command without --overwrite continues" in result.stderr
    assert out.read_text() == before
    engine.interrupt_after = None
    result = run("generate", source, "-o", out)
    assert "2 of 4 are finished" in result.stderr
    assert len(rows(out)[0]["token_ids"]) == 128


def test_a_refused_job_leaves_nothing_that_stands_in_the_way(run, engine, jsonl, tmp_path):
    out = tmp_path / "out.jsonl"
    assert run("generate", jsonl(*PROMPTS), "-o", out, "--max-new-tokens", 300).exit_code == 2
    engine.interrupt_after = 0
    assert run("generate", jsonl(*PROMPTS), "-o", out, "--temperature", 1).exit_code == 130
    engine.interrupt_after = None
    assert run("generate", jsonl(*PROMPTS), "-o", out).exit_code == 0


def test_one_process_at_a_time_writes_an_output(run, jsonl, tmp_path):
    out = tmp_path / "out.jsonl"
    with (tmp_path / "out.jsonl.partial").open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        result = run("generate", jsonl(*PROMPTS), "-o", out)
    assert result.exit_code == 2
    assert "another process is writing it" in result.stderr
