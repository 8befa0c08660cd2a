"""`specbatch generate`: order, resume, atomic output, interruption, malformed lines, data sets."""

from __future__ import annotations

import fcntl
import json
import tempfile
from contextlib import nullcontext, suppress
from pathlib import Path

import datasets
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from specbatch.config import EngineConfig
from specbatch.core.request import SamplingParams
from specbatch.errors import SpecbatchError
from specbatch.jobs.batch_job import BatchJob, read_output, summary

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


def test_a_record_is_written_next_to_the_output(run, jsonl, tmp_path):
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


def test_seeds_depend_on_the_row(run, engine, jsonl, tmp_path, monkeypatch):
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
        (["--no-float8-activations"], "float8_activations (True there, False now)"),
        (["--kv-dtype", "fp8"], "kv_dtype ('auto' there, 'fp8' now)"),
        (["--state-dtype", "bf16"], "state_dtype ('fp32' there, 'bf16' now)"),
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
def test_overwrite_deletes_nothing_before_the_job_is_checked(run, jsonl, tmp_path, wrong):
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


def test_a_rejected_job_leaves_no_files(run, engine, jsonl, tmp_path):
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
    assert "another process is writing to it" in result.stderr


BAD = ["{", '{"prompt": ""}', '{"prompt": "\\ud800"}', "5"]


def test_malformed_lines_are_reported_together_before_loading(run, engine, jsonl, tmp_path):
    result = run("generate", jsonl(PROMPTS[0], *BAD, "", PROMPTS[3], *["{"] * 30), "-o", tmp_path / "out.jsonl")
    assert result.exit_code == 2
    first, *lines = result.stderr.splitlines()
    assert first.endswith("in.jsonl': 34 of 36 lines are malformed; fix them, or pass --skip-bad to leave them out:")
    assert lines[0].startswith(f"{tmp_path / 'in.jsonl'}:2: not JSON")
    assert [line.split(":")[1] for line in lines[:6]] == ["2", "3", "4", "5", "8", "9"]
    assert (len(lines), lines[-1]) == (21, "and 14 more")
    assert engine.built == []
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_malformed_lines_are_skipped_with_skip_bad(run, engine, jsonl, tmp_path):
    out, source = tmp_path / "out.jsonl", jsonl(PROMPTS[0], *BAD, "", PROMPTS[1], {"prompt": "x" * 300}, PROMPTS[3])
    engine.interrupt_after = 1
    result = run("generate", source, "-o", out, "--skip-bad")
    assert "kept 1 finished of 3" in result.stderr
    engine.interrupt_after = None
    result = run("generate", source, "-o", out, "--skip-bad")
    assert result.exit_code == 0
    skipped = [line for line in result.stderr.splitlines() if line.startswith("skipped ")]
    assert [line.split(":")[1] for line in skipped] == ["2", "3", "4", "5", "8"]
    assert skipped[-1].endswith("prompt 7='300 tokens': too long for the stub")
    assert [(row["index"], row.get("id")) for row in rows(out)] == [(0, "first"), (6, None), (8, 4)]
    assert "3 rows in" in result.stdout
    assert "5 malformed lines skipped" in result.stdout
    assert json.loads((tmp_path / "out.jsonl.record.json").read_text())["workload"]["skipped"] == 5
    again = run("generate", source, "-o", tmp_path / "b.jsonl", "--skip-bad", "--json")
    assert json.loads(again.stdout)["skipped"] == 5
    assert (tmp_path / "b.jsonl").read_text() == out.read_text()


def test_prompts_that_the_engine_cannot_run_are_malformed_lines(run, engine, jsonl, tmp_path):
    long = {"prompt": "x" * 300}
    result = run("generate", jsonl(PROMPTS[0], long, long), "-o", tmp_path / "out.jsonl")
    assert result.exit_code == 2
    assert "2 of 3 lines are malformed; fix them, or pass --skip-bad" in result.stderr
    assert f"{tmp_path / 'in.jsonl'}:3: prompt 2=" in result.stderr
    assert engine.order == []


@pytest.mark.parametrize("lines", [BAD, [{"prompt": "x" * 300}] * 2])
def test_only_malformed_lines_are_an_error_even_with_skip_bad(run, engine, jsonl, tmp_path, lines):
    result = run("generate", jsonl(*lines), "-o", tmp_path / "out.jsonl", "--skip-bad")
    assert result.exit_code == 2
    assert f"{len(lines)} of {len(lines)} lines are malformed; fix them:" in result.stderr
    assert engine.order == []


def test_a_shorter_context_on_resume_keeps_what_is_finished(run, engine, jsonl, tmp_path):
    source, out = jsonl({"prompt": "a"}, {"prompt": "b" * 90}), tmp_path / "out.jsonl"
    engine.interrupt_after = 1  # the stub begins at the end
    run("generate", source, "-o", out)
    engine.interrupt_after = None
    assert run("generate", source, "-o", out, "--max-model-len", 150).exit_code == 0
    assert [row["index"] for row in rows(out)] == [0, 1]
    engine.interrupt_after = 1
    run("generate", jsonl({"prompt": "b" * 90}, {"prompt": "a"}), "-o", out, "--overwrite")
    engine.interrupt_after = None
    result = run("generate", tmp_path / "in.jsonl", "-o", out, "--max-model-len", 150, "--skip-bad")
    assert result.exit_code == 0  # all that is missing is too long now
    assert [row["index"] for row in rows(out)] == [1]


def test_an_output_that_another_process_wrote_meanwhile_is_kept(engine, jsonl, tmp_path):
    out = tmp_path / "out.jsonl"
    job = BatchJob.open(jsonl(*PROMPTS), out, EngineConfig(), SamplingParams(max_new_tokens=4))
    out.write_text("theirs")
    with pytest.raises(SpecbatchError, match="already exists"):
        job.run(engine(EngineConfig()))
    assert out.read_text() == "theirs"


LINES = st.lists(
    st.one_of(
        st.integers(1, 60).map(lambda n: json.dumps({"prompt": "p" * n, "id": n}).encode()),
        st.lists(st.integers(0, 255), min_size=1, max_size=3).map(
            lambda n: json.dumps({"prompt_token_ids": n}).encode()
        ),
        st.sampled_from(
            [b"", b"\r", b"  ", b"{", b"\xff", b"\0", b"[]", b'{"prompt": ""}', b'{"prompt_token_ids": [-1]}']
        ),
        st.just(json.dumps({"prompt": "x" * 300}).encode()),
    ),
    max_size=8,
)


def ids_of_good(line):
    """What a line asks, None where it asks nothing that can be run."""
    try:
        row = json.loads(line)
        ids = row["prompt_token_ids"] if "prompt_token_ids" in row else list(row["prompt"].encode())
    except (ValueError, TypeError):
        return None
    return ids if ids and min(ids) >= 0 and len(ids) < 256 - 4 else None


@given(lines=LINES, cuts=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 200)), max_size=4))
@example(lines=[b'{"prompt": "a"}', b"{", b'{"prompt": "b"}'], cuts=[(1, 3), (1, 0)])
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rows_are_the_valid_lines_in_order_after_any_interruptions(engine, lines, cuts):
    """cuts: after how many more completions a run is interrupted, and how many bytes its file then loses."""
    config, params = EngineConfig(), SamplingParams(max_new_tokens=4)
    wanted = {index: ids for index, line in enumerate(lines) if (ids := ids_of_good(line)) is not None}
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder) / "in.jsonl", Path(folder) / "out.jsonl"
        source.write_bytes(b"\n".join(lines))

        def work(interrupt_after):
            engine.interrupt_after = interrupt_after
            job = BatchJob.open(source, out, config, params, skip_bad=True)
            return job.run(engine(config))

        for after, lost in [*cuts, (None, 0)]:
            try:
                done = work(after)
            except KeyboardInterrupt:
                assert not out.exists()
                partial = Path(f"{out}.partial")
                content = partial.read_bytes()
                partial.write_bytes(content[: max(len(content) - lost, 0)])
            except SpecbatchError:
                assert not wanted
                assert not out.exists()
                return
            else:
                break
        assert done == rows(out)
        assert [row["index"] for row in done] == list(wanted)
        assert [row["token_ids"][0] for row in done] == [(ids[-1] + 1) % 256 for ids in wanted.values()]
        assert sorted(path.name for path in Path(folder).iterdir()) == ["in.jsonl", "out.jsonl"]


@pytest.mark.parametrize("name", ["out.parquet", "out", "qwen3.5/"])
def test_a_data_set_output_has_the_rows_of_jsonl(run, engine, jsonl, tmp_path, name):
    source = jsonl(*PROMPTS[:3], PROMPTS[3] | {"id": "4"})
    options = ("--max-new-tokens", 1)  # nothing is verified, so that there is no accept length
    run("generate", source, "-o", tmp_path / "out.jsonl", *options)
    engine.interrupt_after = 2
    words = ("generate", source, "-o", f"{tmp_path}/{name}", *options)
    assert run(*words).exit_code == 130
    path = tmp_path / name
    assert not path.exists()
    assert len((tmp_path / f"{path.name}.partial").read_text().splitlines()) == 3
    engine.interrupt_after = None
    assert run(*words).exit_code == 0
    assert read_output(path) == read_output(tmp_path / "out.jsonl")
    made = datasets.load_from_disk(path) if path.is_dir() else datasets.Dataset.from_parquet(str(path))
    assert made.column_names == list(rows(tmp_path / "out.jsonl")[0])
    assert run(*words).exit_code == 2
    before = {file: file.read_bytes() for file in ([path] if path.is_file() else path.iterdir())}
    assert run(*words, "--overwrite", "--max-new-tokens", 300).exit_code == 2
    assert {file: file.read_bytes() for file in before} == before
    assert run(*words, "--overwrite", "--max-new-tokens", 2).exit_code == 0
    assert [len(row["token_ids"]) for row in read_output(path)] == [2] * 4
    ours = {"in.jsonl", "out.jsonl", "out.jsonl.record.json", path.name, f"{path.name}.record.json"}
    assert {file.name for file in tmp_path.iterdir()} == ours


def test_a_data_set_is_run_like_jsonl(run, jsonl, tmp_path):
    texts = ["a", "b?", "", "d"]
    table = datasets.Dataset.from_dict({"body": texts, "id": [5, 6, 7, 8]})
    datasets.DatasetDict({"a": table, "b": table}).save_to_disk(tmp_path / "saved")
    words = ("generate", tmp_path / "saved", "--split", "b", "--column", "body")
    result = run(*words, "-o", tmp_path / "out")
    assert result.exit_code == 2
    assert "saved row 3': body is empty" in result.stderr
    result = run(*words, "-o", tmp_path / "out", "--skip-bad")
    assert result.exit_code == 0, result.output
    found = read_output(tmp_path / "out")
    assert [(row["index"], row["id"]) for row in found] == [(0, 5), (1, 6), (3, 8)]
    run("generate", jsonl(*({"prompt": text} for text in texts if text)), "-o", tmp_path / "lines.jsonl")
    assert [row["token_ids"] for row in found] == [row["token_ids"] for row in rows(tmp_path / "lines.jsonl")]


def test_another_split_or_column_is_another_job(run, engine, tmp_path):
    table = datasets.Dataset.from_dict({"x": ["a", "b"], "y": ["c", "d"]})
    datasets.DatasetDict({"a": table, "b": table.select([0])}).save_to_disk(tmp_path / "saved")
    words = ("generate", tmp_path / "saved", "-o", tmp_path / "out.jsonl")
    engine.interrupt_after = 1
    assert run(*words, "--split", "a", "--column", "x").exit_code == 130
    for other in (("--split", "b", "--column", "x"), ("--split", "a", "--column", "y")):
        result = run(*words, *other)
        assert result.exit_code == 2
        assert "was made with another input file" in result.stderr


def test_the_same_text_in_another_form_is_another_job(run, engine, jsonl, tmp_path):
    words = ("generate", jsonl(*[{"prompt": "a", "question": "a"}] * 2), "-o", tmp_path / "out.jsonl", "--column")
    engine.interrupt_after = 1
    assert run(*words, "prompt").exit_code == 130
    assert "was made with another input file" in run(*words, "question").stderr


@pytest.mark.parametrize(
    ("output", "says"),
    [
        ("out.csv", "name a .jsonl or .parquet file, or a folder"),
        ("qwen3.5", "name a .jsonl or .parquet file, or a folder (ending in /"),
        ("deep.parquet", "is a folder; name a .parquet file"),
        ("deep", "is a folder with other files"),
        ("notes", "already exists and is not a folder"),
        ("saved", "is the input"),
        ("fresh", "the ids mix strings and numbers"),
    ],
)
@pytest.mark.parametrize("overwrite", [(), ("--overwrite",)])
def test_an_impossible_output_is_rejected_at_once(run, engine, jsonl, tmp_path, output, says, overwrite):
    for folder in ("deep/er", "deep.parquet"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "notes").write_text("mine")
    datasets.Dataset.from_list([{"prompt": "a"}]).save_to_disk(tmp_path / "saved")
    source = tmp_path / "saved" if output == "saved" else jsonl(*PROMPTS)
    result = run("generate", source, "-o", tmp_path / output, *overwrite)
    assert result.exit_code == 2
    assert says in result.stderr
    assert engine.built == []
    assert (tmp_path / "notes").read_text() == "mine"
    assert len(list((tmp_path / "saved").iterdir())) == 3


def test_the_input_in_the_folder_of_the_output_is_not_overwritten(run, tmp_path):
    datasets.Dataset.from_list([{"prompt": "a"}]).save_to_disk(tmp_path / "saved")
    result = run("generate", tmp_path / "saved/data-00000-of-00001.arrow", "-o", tmp_path / "saved", "--overwrite")
    assert result.exit_code == 2
    assert "is the input" in result.stderr


def test_an_empty_folder_can_be_the_output(run, jsonl, tmp_path):
    (tmp_path / "out").mkdir()
    assert run("generate", jsonl({"prompt": "a"}), "-o", tmp_path / "out").exit_code == 0
    assert len(read_output(tmp_path / "out")) == 1


def test_a_summary_is_the_last_line_on_standard_error(run, jsonl, tmp_path):
    for words, said in (((), ""), (("--spec", "v2"), ", accept length 2.00")):
        out = tmp_path / f"{len(words)}.jsonl"
        result = run("generate", jsonl(*PROMPTS), "-o", out, "--max-new-tokens", 3, *words)
        assert result.stderr.splitlines()[-1] == f"generate: 4 prompts, 12 output tokens in 2.0 s: 6 tok/s{said}"
    nothing = {"requests": 0, "output_tokens": 0, "duration_s": 0.0, "output_throughput": None, "accept_length": None}
    assert summary(nothing, drafts=True) == "0 prompts, 0 output tokens in 0.0 s"


def test_the_remaining_time_ignores_earlier_work(run, engine, jsonl, tmp_path, monkeypatch):
    begun = []
    monkeypatch.setattr(
        "specbatch.cli.generate.progress", lambda *words: begun.append(words) or nullcontext(lambda *told: None)
    )
    engine.interrupt_after = 3
    run("generate", jsonl(*PROMPTS), "-o", tmp_path / "out.jsonl")
    engine.interrupt_after = None
    run("generate", jsonl(*PROMPTS), "-o", tmp_path / "out.jsonl")
    assert begun == [("generate", 0), ("generate", 3)]


def test_progress_shows_speed_and_where_an_earlier_run_stopped(engine, jsonl, tmp_path):
    config, params = EngineConfig(), SamplingParams(max_new_tokens=3)

    def work():
        said = []
        job = BatchJob.open(jsonl(*PROMPTS), tmp_path / "out.jsonl", config, params)
        with suppress(KeyboardInterrupt):
            job.run(engine(config), report=lambda *words: said.append(words))
        return said

    engine.interrupt_after = 2
    before = work()
    engine.interrupt_after = None
    after = work()
    assert {total for _, total, _ in before + after} == {4}
    assert [done for done, *_ in after][-1] == 4
    assert min(done for done, *_ in after) >= 2
    assert all(" tok/s, " in note and note.endswith(" running") for *_, note in before + after)
