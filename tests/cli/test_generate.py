"""`specbatch generate`: order, resume, atomic output, interruption, malformed lines, data sets."""

from __future__ import annotations

import fcntl
import json
import tempfile
from contextlib import nullcontext, suppress
from pathlib import Path
from unittest.mock import Mock

import datasets
import pytest
from examples import examples
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st

from specbatch.cli.generate import summary
from specbatch.config.engine_config import EngineConfig
from specbatch.core.sampling_params import SamplingParams
from specbatch.errors import SpecbatchError
from specbatch.jobs.batch_job import BatchJob
from specbatch.jobs.job_settings import JobSettings
from specbatch.jobs.output_files import read_output

PROMPTS = [{"prompt": "a", "id": "first"}, {"prompt_token_ids": [5, 6]}, {"question": "b?"}, {"prompt": "d", "id": 4}]
LONG = {"prompt": "x" * 300}  # the stub takes 256 tokens
BAD = ["{", '{"prompt": ""}', '{"prompt": "\\ud800"}', "5"]
CONTENT = {"prompt": "a", "question": "a"}


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def generate(run, engine, jsonl, tmp_path):
    """`generate(options)` runs the command over `lines`; it is interrupted after so many completions."""

    def call(options="", lines=PROMPTS, out="out.jsonl", interrupt_after=None):
        engine.interrupt_after = interrupt_after
        source = lines if isinstance(lines, Path) else jsonl(*lines)
        return run("generate", source, "-o", f"{tmp_path}/{out}", *options.split())

    return call


@pytest.fixture
def saved(tmp_path):
    """A data set of two splits with two columns of text."""
    texts = ["a", "b?", "", "d"]
    table = datasets.Dataset.from_dict({"body": texts, "other": ["c"] * 4, "id": [5, 6, 7, 8]})
    datasets.DatasetDict({"a": table.select([0, 1]), "b": table}).save_to_disk(tmp_path / "saved")
    return tmp_path / "saved"


def test_rows_record_and_json_line(generate, tmp_path):
    result = generate("--max-new-tokens 3 --spec v2 --json", out="deep/out.jsonl")
    assert result.exit_code == 0, result.output
    out = rows(tmp_path / "deep" / "out.jsonl")
    assert [row["index"] for row in out] == [0, 1, 2, 3]
    assert [row.get("id") for row in out] == ["first", None, None, 4]
    assert (out[0]["text"], out[0]["accept_length"], out[0]["finish_reason"]) == ("bcd", 2.0, "length")
    assert out[1]["token_ids"] == [7, 8, 9]
    names = {path.name for path in (tmp_path / "deep").iterdir()}
    assert names == {"out.jsonl", "out.jsonl.record.json"}
    (line,) = result.stdout.splitlines()
    found, record = json.loads(line), json.loads((tmp_path / "deep" / "out.jsonl.record.json").read_text())
    assert (found["rows"], found["record"]) == (4, str(tmp_path / "deep" / "out.jsonl.record.json"))
    assert record["metrics"] == found["metrics"]
    assert record["workload"]["command"] == "generate"
    assert len(record["workload"]["input_sha256"]) == 64
    assert "memory plan" in result.stderr


@pytest.mark.parametrize(
    ("option", "text"), [("--chat-template", "<system>x<user>y<assistant>"), ("--no-chat-template", "x\n\ny")]
)
def test_messages_are_rendered_or_joined(generate, tmp_path, option, text):
    generate(option, [{"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]}])
    assert rows(tmp_path / "out.jsonl")[0]["prompt_tokens"] == len(text)


def test_one_prompt_is_singular(generate):
    result = generate(lines=PROMPTS[:1])
    assert result.stdout.startswith("answers to 1 prompt in ")
    assert "generate: 1 answer, " in result.stderr


def test_second_interruption_does_not_hide_what_is_kept(generate, engine):
    """It arrives while the first one is handled, in code that does not know what is kept."""

    def interrupted_again():
        raise KeyboardInterrupt

    engine.leaving = interrupted_again
    assert "interrupted; kept 2 finished of 4" in generate(interrupt_after=2).stderr


def test_the_engine_is_told_the_size_of_the_job(generate, engine):
    generate("--max-new-tokens 3", interrupt_after=2)
    generate("--max-new-tokens 3")
    assert [config.job.requests for config in engine.built] == [4, 2]
    assert engine.built[0].job.new_tokens == 3
    assert 1 <= engine.built[0].job.prompt_tokens <= 10
    assert engine.built[0].max_running == "auto"


def test_interrupted_run_continues(generate, engine, tmp_path):
    """With another concurrency, which does not change the rows."""
    result = generate(interrupt_after=2)
    assert result.exit_code == 130
    assert "interrupted; kept 2 finished of 4" in result.stderr
    assert not (tmp_path / "out.jsonl").exists()
    partial = tmp_path / "out.jsonl.partial"
    assert {row["index"] for row in rows(partial)[1:]} == {2, 3}
    partial.write_text(partial.read_text() + '{"index": 0, "te')  # as after a power cut
    result = generate("--concurrency 2")
    assert result.exit_code == 0
    assert "2 of 4 are finished" in result.stderr
    assert len(engine.order) == 2  # two runs of the engine, the second for the missing rows only
    generate(out="once.jsonl")
    assert (tmp_path / "once.jsonl").read_text() == (tmp_path / "out.jsonl").read_text()


@pytest.mark.parametrize("value", [[], ["<think>"]])
def test_partial_output_of_a_version_with_fewer_sampling_parameters(generate, tmp_path, value):
    """It had the default of a parameter that it did not know. A value that it has counts."""
    generate(interrupt_after=2)
    partial = tmp_path / "out.jsonl.partial"
    first, *rest = rows(partial)
    assert first["sampling"].pop("reasoning") == []
    if value:
        first["sampling"]["reasoning"] = value
    partial.write_text("".join(json.dumps(row) + "\n" for row in (first, *rest)))
    result = generate()
    if value:
        assert result.exit_code == 2
        assert "was made with another reasoning (['<think>'] there, [] now)" in result.stderr
        return
    assert result.exit_code == 0, result.output
    assert "2 of 4 are finished" in result.stderr
    record = tmp_path / "out.jsonl.record.json"
    found = json.loads(record.read_text())
    del found["workload"]["sampling"]["reasoning"]
    record.write_text(json.dumps(found))
    again = generate()
    assert again.exit_code == 0, again.output


def test_seeds_depend_on_the_row(generate, engine):
    seen = []
    engine.answering = lambda prompt, params: seen.append((prompt[0], params.seed)) or prompt
    prompts = [{"prompt_token_ids": [number]} for number in range(1, 6)]
    generate("--temperature 1", prompts, "whole.jsonl")
    whole = dict(seen)
    seen.clear()
    for interrupt_after in (2, None):
        generate("--temperature 1", prompts, "resumed.jsonl", interrupt_after)
    assert dict(seen) == whole
    assert len(set(whole.values())) == 5


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("--temperature 0.5", "temperature (0.0 there, 0.5 now)"),
        ("--model other", "model ('smollm2-135m' there, 'other' now)"),
        ("--spec v1", "algorithm ('none' there, 'ngram' now)"),
        ("--no-chat-template", "--chat-template (True there, False now)"),
        ("--no-fp8-activations", "--fp8-activations (True there, False now)"),
        ("--kv-dtype fp8", "--kv-dtype ('auto' there, 'fp8' now)"),
        ("--state-dtype bf16", "--state-dtype ('fp32' there, 'bf16' now)"),
    ],
)
def test_another_job_is_not_continued(generate, change, named):
    generate(interrupt_after=1)
    result = generate(change)
    assert result.exit_code == 2
    assert named in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("lines", "first", "then"),
    [
        (PROMPTS, "", PROMPTS[1:]),
        ([CONTENT] * 2, "--column prompt", "--column question"),  # the same text in another form
        ("saved", "--split a --column body", "--split b --column body --skip-bad"),
        ("saved", "--split a --column body", "--split a --column other"),
    ],
)
def test_another_input_is_not_continued(generate, saved, lines, first, then):
    source = saved if lines == "saved" else lines
    assert generate(first, source, interrupt_after=1).exit_code == 130
    result = generate(then, source) if isinstance(then, str) else generate("", then)
    assert result.exit_code == 2
    assert "was made with another input file" in result.stderr


def test_overwrite_replaces_a_finished_output_after_all_checks(generate, tmp_path):
    generate()
    before = (tmp_path / "out.jsonl").read_text()
    for wrong in ("--max-running 0", "--max-new-tokens 300"):
        assert generate(f"--overwrite {wrong}").exit_code == 2
        assert (tmp_path / "out.jsonl").read_text() == before
    assert generate("--overwrite", PROMPTS[:1]).exit_code == 0
    assert len(rows(tmp_path / "out.jsonl")) == 1


def test_interrupted_overwrite_keeps_the_old_output_and_continues(generate, tmp_path):
    out = tmp_path / "out.jsonl"
    generate("--max-new-tokens 3")
    before = out.read_text()
    assert "the same command without --overwrite continues" in generate("--overwrite", interrupt_after=2).stderr
    assert out.read_text() == before
    assert "2 of 4 are finished" in generate().stderr
    assert len(rows(out)[0]["token_ids"]) == 128


def test_refused_job_leaves_no_files(generate):
    assert generate("--max-new-tokens 300").exit_code == 2
    assert generate("--temperature 1", interrupt_after=0).exit_code == 130
    assert generate().exit_code == 0


def test_output_is_locked(generate, tmp_path):
    with (tmp_path / "out.jsonl.partial").open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        result = generate()
    assert result.exit_code == 2
    assert "another process is writing to it" in result.stderr


def test_malformed_lines_are_reported_together_before_loading(generate, engine, tmp_path):
    result = generate("", [PROMPTS[0], *BAD, "", PROMPTS[3], *["{"] * 30])
    assert result.exit_code == 2
    first, *lines = result.stderr.splitlines()
    assert first.endswith("in.jsonl': 34 of 36 lines are malformed; fix them, or pass --skip-bad to leave them out:")
    assert lines[0].startswith(f"{tmp_path / 'in.jsonl'}:2: not JSON")
    assert [line.split(":")[1] for line in lines[:6]] == ["2", "3", "4", "5", "8", "9"]
    assert (len(lines), lines[-1]) == (21, "and 14 more")
    assert engine.built == []
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_skip_bad_skips_malformed_lines(generate, tmp_path):
    lines = [PROMPTS[0], *BAD, "", PROMPTS[1], LONG, PROMPTS[3]]
    assert "kept 1 finished of 3" in generate("--skip-bad", lines, interrupt_after=1).stderr
    result = generate("--skip-bad", lines)
    assert result.exit_code == 0
    skipped = [line for line in result.stderr.splitlines() if line.startswith("skipped ")]
    assert [line.split(":")[1] for line in skipped] == ["2", "3", "4", "5", "8"]
    assert skipped[-1].endswith("prompt='300 tokens': too long for the stub")
    assert [(row["index"], row.get("id")) for row in rows(tmp_path / "out.jsonl")] == [(0, "first"), (6, None), (8, 4)]
    assert "answers to 3 prompts in" in result.stdout
    assert "5 malformed lines skipped" in result.stdout
    assert json.loads((tmp_path / "out.jsonl.record.json").read_text())["workload"]["skipped"] == 5
    assert json.loads(generate("--skip-bad --json", lines, "b.jsonl").stdout)["skipped"] == 5
    assert (tmp_path / "b.jsonl").read_text() == (tmp_path / "out.jsonl").read_text()


@pytest.mark.parametrize(
    ("options", "lines", "messages"),
    [
        (
            "",
            [PROMPTS[0], LONG],
            ["in.jsonl:2': prompt='300 tokens': too long for the stub (--skip-bad leaves it out"],
        ),
        ("", [PROMPTS[0], LONG, LONG], ["2 of 3 lines are malformed; fix them, or pass --skip-bad", ":3: prompt="]),
        ("--skip-bad", [LONG, LONG], ["2 of 2 lines are malformed; fix them:"]),
        ("--skip-bad", BAD, ["4 of 4 lines are malformed; fix them:"]),
    ],
)
def test_malformed_lines_are_an_error(generate, engine, options, lines, messages):
    """Prompts that the engine cannot run are malformed lines; --skip-bad leaves at least one line."""
    result = generate(options, lines)
    assert result.exit_code == 2
    assert all(message in result.stderr for message in messages)
    assert engine.order == []


def test_shorter_context_keeps_finished_rows(generate, tmp_path):
    lines = [{"prompt": "a"}, {"prompt": "b" * 90}]
    generate("", lines, interrupt_after=1)  # the stub begins at the end
    assert generate("--max-model-len 150", lines).exit_code == 0
    assert [row["index"] for row in rows(tmp_path / "out.jsonl")] == [0, 1]
    generate("--overwrite", lines[::-1], interrupt_after=1)
    result = generate("--max-model-len 150 --skip-bad", lines[::-1])
    assert result.exit_code == 0  # every missing prompt is too long now
    assert [row["index"] for row in rows(tmp_path / "out.jsonl")] == [1]


def test_output_of_another_process_is_not_replaced(engine, jsonl, tmp_path):
    out = tmp_path / "out.jsonl"
    job = BatchJob.open(jsonl(*PROMPTS), out, EngineConfig(), SamplingParams(max_new_tokens=4))
    out.write_text("theirs")
    with pytest.raises(SpecbatchError, match="already exists"):
        job.run(engine(EngineConfig()))
    assert out.read_text() == "theirs"


def test_failed_prompts_have_rows_with_their_reason(generate, engine, tmp_path):
    lines = [PROMPTS[0], {"prompt": "!fail one", "id": "x"}, PROMPTS[1], {"prompt": "!fail two"}]
    assert generate("--max-failures 2", lines, interrupt_after=3).exit_code == 130
    result = generate("--max-failures 2", lines)
    assert result.exit_code == 0
    assert "answers to 4 prompts in" in result.stdout
    assert "2 of them failed" in result.stdout
    error = {"finish_reason": "error", "error": "its logits are not finite"}
    found = rows(tmp_path / "out.jsonl")
    assert [found[1], found[3]] == [{"index": 1, "id": "x", **error}, {"index": 3, **error}]
    assert ["error" in row for row in found] == [False, True, False, True]
    result = generate("", lines, "out.parquet")
    assert result.exit_code == 1
    assert "in.jsonl:2: its logits are not finite" in result.stderr
    assert [row.get("error") for row in read_output(tmp_path / "out.parquet")] == [row.get("error") for row in found]


def test_rows_that_another_process_finished_meanwhile_are_kept(generate, engine, jsonl, tmp_path):
    """The second process read the partial output before the first one continued it, and waited for its model."""
    source, out, params = jsonl(*PROMPTS), tmp_path / "out.jsonl", SamplingParams(max_new_tokens=4)
    second = BatchJob.open(source, out, EngineConfig(), params)
    assert not second.finished
    first = BatchJob.open(source, out, EngineConfig(), params)
    engine.interrupt_after = 3
    with pytest.raises(KeyboardInterrupt):
        first.run(engine(EngineConfig()))
    kept = rows(first.partial)[1:]
    engine.interrupt_after = None
    running = engine(EngineConfig())
    assert second.run(running)
    written = rows(out)
    assert len(running.done) == len(PROMPTS) - 3
    assert [row["index"] for row in written] == list(range(len(PROMPTS)))
    assert all(row in written for row in kept)


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


def ids_of(line):
    """The prompt's token ids; None for a malformed line."""
    try:
        row = json.loads(line)
        ids = row["prompt_token_ids"] if "prompt_token_ids" in row else list(row["prompt"].encode())
    except (ValueError, TypeError):
        return None
    return ids if ids and min(ids) >= 0 and len(ids) < 256 - 4 else None


@given(lines=LINES, cuts=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 200)), max_size=4))
@example(lines=[b'{"prompt": "a"}', b"{", b'{"prompt": "b"}'], cuts=[(1, 3), (1, 0)])
@examples(30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rows_after_any_interruptions_are_the_valid_lines_in_order(engine, lines, cuts):
    """cuts: after how many more completions a run is interrupted, and how many bytes its file then loses."""
    config, params = EngineConfig(), SamplingParams(max_new_tokens=4)
    wanted = {index: ids for index, line in enumerate(lines) if (ids := ids_of(line)) is not None}
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder) / "in.jsonl", Path(folder) / "out.jsonl"
        source.write_bytes(b"\n".join(lines))

        def work(interrupt_after):
            engine.interrupt_after = interrupt_after
            job = BatchJob.open(source, out, config, params, settings=JobSettings(skip_bad=True))
            assert job.run(engine(config))

        for after, lost in [*cuts, (None, 0)]:
            try:
                work(after)
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
        done = rows(out)
        assert [row["index"] for row in done] == list(wanted)
        assert [row["token_ids"][0] for row in done] == [(ids[-1] + 1) % 256 for ids in wanted.values()]
        assert sorted(path.name for path in Path(folder).iterdir()) == ["in.jsonl", "out.jsonl"]


@pytest.mark.parametrize("name", ["out.parquet", "out", "qwen3.5/"])
def test_data_set_output_has_the_rows_of_jsonl(generate, tmp_path, name):
    lines = [*PROMPTS[:3], PROMPTS[3] | {"id": "4"}]
    one = "--max-new-tokens 1"  # nothing is verified, so that there is no accept length
    generate(one, lines)
    assert generate(one, lines, name, interrupt_after=2).exit_code == 130
    path = tmp_path / name
    assert not path.exists()
    assert len((tmp_path / f"{path.name}.partial").read_text().splitlines()) == 3
    assert generate(one, lines, name).exit_code == 0
    assert read_output(path) == read_output(tmp_path / "out.jsonl")
    made = datasets.load_from_disk(path) if path.is_dir() else datasets.Dataset.from_parquet(str(path))
    assert made.column_names == list(rows(tmp_path / "out.jsonl")[0])
    assert generate("--max-new-tokens 2", lines, name).exit_code == 2
    before = {file: file.read_bytes() for file in ([path] if path.is_file() else path.iterdir())}
    assert generate("--overwrite --max-new-tokens 300", lines, name).exit_code == 2
    assert {file: file.read_bytes() for file in before} == before
    assert generate("--overwrite --max-new-tokens 2", lines, name).exit_code == 0
    assert [len(row["token_ids"]) for row in read_output(path)] == [2] * 4
    ours = {"in.jsonl", "out.jsonl", "out.jsonl.record.json", path.name, f"{path.name}.record.json"}
    assert {file.name for file in tmp_path.iterdir()} == ours


def test_data_set_input_runs_like_jsonl(generate, saved, tmp_path):
    (tmp_path / "out").mkdir()  # an empty folder can be the output
    result = generate("--split b --column body", saved, "out")
    assert result.exit_code == 2
    assert "saved row 3': body is empty" in result.stderr
    result = generate("--split b --column body --skip-bad", saved, "out")
    assert result.exit_code == 0, result.output
    found = read_output(tmp_path / "out")
    assert [(row["index"], row["id"]) for row in found] == [(0, 5), (1, 6), (3, 8)]
    generate("", [{"prompt": text} for text in ("a", "b?", "d")], "lines.jsonl")
    assert [row["token_ids"] for row in found] == [row["token_ids"] for row in rows(tmp_path / "lines.jsonl")]


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("out.csv", "name a .jsonl or .parquet file, or a folder"),
        ("qwen3.5", "name a .jsonl or .parquet file, or a folder (ending in /"),
        ("deep.parquet", "is a folder; name a .parquet file"),
        ("deep", "is a folder with other files"),
        ("notes", "already exists and is not a folder"),
        ("saved", "would replace the input"),
        ("fresh", "the ids mix strings and numbers"),
    ],
)
@pytest.mark.parametrize("overwrite", ["", "--overwrite"])
def test_impossible_output_is_refused_at_once(generate, engine, tmp_path, output, message, overwrite):
    for folder in ("deep/er", "deep.parquet"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "notes").write_text("mine")
    datasets.Dataset.from_list([{"prompt": "a"}]).save_to_disk(tmp_path / "saved")
    sources = [tmp_path / "saved", next((tmp_path / "saved").glob("*.arrow"))] if output == "saved" else [PROMPTS]
    for source in sources:
        result = generate(overwrite, source, output)
        assert result.exit_code == 2
        assert message in result.stderr
    assert engine.built == []
    assert (tmp_path / "notes").read_text() == "mine"
    assert len(list((tmp_path / "saved").iterdir())) == 3


@pytest.mark.parametrize("name", ["q.jsonl.partial", "q.jsonl.record.json", "link/q.jsonl", "hard.jsonl"])
def test_input_is_never_replaced(run, jsonl, engine, tmp_path, name):
    """The output itself through a link, and the files next to it that a job writes and removes."""
    source, path = jsonl(*PROMPTS), tmp_path / name
    (tmp_path / "link").symlink_to(tmp_path)
    if name == "hard.jsonl":
        path.hardlink_to(source)
        source = source.rename(tmp_path / "q.jsonl")
    else:
        source = source.rename(path)
    before = source.read_bytes()
    result = run("generate", path, "-o", tmp_path / "q.jsonl", "--overwrite")
    assert result.exit_code == 2
    assert "would replace the input" in result.stderr
    assert source.read_bytes() == before
    assert engine.built == []


def test_summary_is_the_last_line_on_standard_error(generate):
    for options, accepted in (("", ""), ("--spec v2 --overwrite", ", accept length 2.00")):
        result = generate(f"--max-new-tokens 3 {options}")
        assert result.stderr.splitlines()[-1] == f"generate: 4 answers, 12 output tokens in 2.0 s: 6 tok/s{accepted}"
    nothing = {"requests": 0, "output_tokens": 0, "duration_s": 0.0, "output_throughput": None, "accept_length": None}
    assert summary(nothing, drafts=True) == "0 answers, 0 output tokens in 0.0 s"


def test_remaining_time_ignores_earlier_work(generate, monkeypatch):
    begun = []
    monkeypatch.setattr("specbatch.cli.generate.progress", lambda *words: begun.append(words) or nullcontext(Mock()))
    generate(interrupt_after=3)
    generate()
    assert begun[1::2] == [("generate", "prompts", 0), ("generate", "prompts", 3)]


def test_progress_shows_speed_and_where_an_earlier_run_stopped(engine, jsonl, tmp_path):
    def work(interrupt_after):
        engine.interrupt_after = interrupt_after
        reports = []
        params = SamplingParams(max_new_tokens=3)
        job = BatchJob.open(jsonl(*PROMPTS), tmp_path / "out.jsonl", EngineConfig(), params)
        with suppress(KeyboardInterrupt):
            job.run(engine(EngineConfig()), report=lambda *words: reports.append(words))
        return reports

    before, after = work(2), work(None)
    assert {total for _, total, _ in before + after} == {4}
    assert [done for done, *_ in after][-1] == 4
    assert min(done for done, *_ in after) >= 2
    assert all(" tok/s, " in note and note.endswith(" running") for *_, note in before + after)
