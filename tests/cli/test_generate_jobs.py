"""`specbatch generate`: parameters per row, samples, limits, failed rows, object stores, write errors."""

from __future__ import annotations

import errno
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import datasets
import fsspec
import pytest

import specbatch
from specbatch.jobs.dataset import BATCH
from specbatch.jobs.output_files import read_output
from specbatch.jobs.partial_output import PartialRows

from .conftest import StubTokenizer

PROMPTS = [{"prompt": letter} for letter in "abcdef"]


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def generate(run, engine, jsonl, tmp_path):
    def call(options="", lines=PROMPTS, out="out.jsonl", interrupt_after=None):
        engine.interrupt_after = interrupt_after
        source = lines if isinstance(lines, str | Path) else jsonl(*lines)
        target = out if "://" in out else f"{tmp_path}/{out}"
        return run("generate", source, "-o", target, *options.split())

    return call


@pytest.fixture
def memory():
    """fsspec's file system in memory."""
    files = fsspec.filesystem("memory")
    files.store.clear()
    files.pseudo_dirs[:] = [""]
    return files


@pytest.fixture
def seen(engine):
    """Prompts and sampling parameters that reach the engine."""
    found = {}

    def note(prompt, params):
        found[bytes(prompt).decode()] = params
        return prompt

    engine.answering = note
    return found


# -- parameters of a row ----------------------------------------------------------------------------------------------


def test_sampling_of_a_row_overrides_the_options(generate, seen):
    lines = [{"prompt": "a", "sampling": {"temperature": 0.5, "max_new_tokens": 2, "seed": 9, "stop": "x"}}, PROMPTS[1]]
    assert generate("--temperature 1 --max-new-tokens 5 --stop y", lines).exit_code == 0
    a, b = seen["a"], seen["b"]
    assert (a.temperature, a.max_new_tokens, a.seed, a.stop) == (0.5, 2, 9, ("x",))
    assert (b.temperature, b.max_new_tokens, b.stop) == (1.0, 5, ("y",))


def test_parameters_that_greedy_answers_ignore_are_named_once(generate):
    lines = [{"prompt": "a", "sampling": {"temperature": 0.5}}, PROMPTS[1], {"prompt": "b", "sampling": {"top_k": 4}}]
    result = generate("--top-p 0.5", lines)
    assert result.exit_code == 0
    notes = [line for line in result.stderr.splitlines() if "greedy" in line]
    assert [line.partition(".jsonl:")[2] for line in notes] == [
        "2: the answer is greedy, so top_p has no effect; set a temperature",
        "3: the answer is greedy, so top_k has no effect; set a temperature",
    ]
    assert "greedy" not in generate("--top-p 0.5 --temperature 0.5", [PROMPTS[1]], "other.jsonl").stderr


def test_parameters_beside_the_prompt_are_named_once(generate):
    lines = [PROMPTS[0], *[{"prompt": text, "temperature": 1.0, "max_tokens": 1, "source": "x"} for text in "ab"]]
    result = generate(lines=lines)
    assert result.exit_code == 0
    assert result.stderr.count("has no effect") == 1
    assert "in.jsonl:2: max_tokens, temperature beside the prompt has no effect" in result.stderr


@pytest.mark.parametrize(
    ("sampling", "problem"),
    [
        ({"temprature": 1}, 'sampling has no parameter "temprature"; did you mean temperature?'),
        ({"max_tokens": 4}, 'sampling has no parameter "max_tokens"; use max_new_tokens'),
        ({"temperature": -1}, "sampling.temperature=-1: use 0"),
        ({"n": 0}, "sampling.n=0"),
        ({"stop": 5}, "sampling.stop=5"),
        ({"ignore_eos": "yes", "n": None}, "sampling.n=null: use a whole number"),
        ({"logprobs": 1}, "sampling.logprobs=1: use a boolean"),
        ([], "sampling=[]: use an object"),
        ("hot", 'sampling="hot": use an object'),
    ],
)
def test_sampling_that_cannot_work_is_a_malformed_line(generate, engine, sampling, problem):
    result = generate(lines=[PROMPTS[0], {"prompt": "b", "sampling": sampling}])
    assert result.exit_code == 2
    assert f"in.jsonl:2': {problem}" in result.stderr
    assert engine.built == []


@pytest.mark.parametrize("interrupt_after", [None, 3])
def test_each_prompt_is_encoded_once_and_chats_are_rendered_together(generate, engine, tmp_path, interrupt_after):
    chats = [{"messages": [{"role": "user", "content": f"c{n}"}]} for n in range(3)]
    ids = [{"prompt_token_ids": [5]}]
    generate(lines=PROMPTS + chats + ids, interrupt_after=interrupt_after)
    finished = 0 if interrupt_after is None else 2  # and the ids: the stub answers the last ones first
    encoded, ahead = [], []

    class Noting(StubTokenizer):
        def encode(self, text, **options):
            encoded.append(text)
            return super().encode(text, **options)

        def render_ahead(self, conversations):
            ahead.append(list(conversations))

    engine.tokenizer_class = Noting
    result = generate("--overwrite" if interrupt_after is None else "", PROMPTS + chats + ids)
    assert result.exit_code == 0
    assert len(encoded) == len(set(encoded)) == 9 - finished
    assert ahead == [[chat["messages"] for chat in chats if f"<user>{chat['messages'][0]['content']}<" in str(encoded)]]
    assert [row["prompt_tokens"] for row in rows(tmp_path / "out.jsonl")] == [1] * 6 + [19] * 3 + [1]


def test_another_sampling_is_another_job(generate):
    lines = [{"prompt": "a", "sampling": {"temperature": 0.5}}, *PROMPTS]
    generate(lines=lines, interrupt_after=2)
    result = generate(lines=[{"prompt": "a", "sampling": {"temperature": 0.6}}, *PROMPTS])
    assert result.exit_code == 2
    assert "was made with another input file" in result.stderr


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet", "out"])
def test_each_sample_is_a_row(generate, tmp_path, name):
    lines = [PROMPTS[0], {"prompt": "b", "id": "x", "sampling": {"n": 3, "max_new_tokens": 2}}, PROMPTS[2]]
    assert generate("", lines, name, interrupt_after=1).exit_code == 130
    result = generate("--json", lines, name)
    assert result.exit_code == 0
    summary = json.loads(result.stdout)
    assert (summary["prompts"], summary["rows"]) == (3, 5)  # each sample is a row
    found = read_output(tmp_path / name)
    assert [(row["index"], row.get("sample")) for row in found] == [(0, None), (1, 0), (1, 1), (1, 2), (2, None)]
    assert {row["text"] for row in found if row["index"] == 1} == {"cd"}
    assert {row.get("id") for row in found if row["index"] == 1} == {"x"}


# -- limits -----------------------------------------------------------------------------------------------------------


def test_total_of_tokens_ends_the_job_and_the_same_command_continues(generate, tmp_path):
    options = "--max-new-tokens 4 --concurrency 2 --max-tokens-total 8"
    result = generate(options)
    assert result.exit_code == 3
    kept = f"stopped by --max-tokens-total; kept 2 finished of 6 in {tmp_path}/out.jsonl.partial; the same command"
    assert result.stderr.splitlines()[-1] == f"{kept} continues"
    assert not (tmp_path / "out.jsonl").exists()
    assert generate(options).exit_code == 3
    result = generate(options)
    assert result.exit_code == 0  # all prompts have run when the total is reached
    assert [row["index"] for row in rows(tmp_path / "out.jsonl")] == list(range(6))


def test_time_limit_ends_the_job(generate, engine, monkeypatch, tmp_path):
    clock = itertools.count(0, 5)
    with monkeypatch.context() as patch:
        patch.setattr("specbatch.jobs.job_run.time.monotonic", lambda: next(clock))
        result = generate("--time-limit 1m --max-new-tokens 2")
    assert result.exit_code == 3
    assert "stopped by --time-limit; kept " in result.stderr
    assert not (tmp_path / "out.jsonl").exists()
    assert generate("--time-limit 1h --max-new-tokens 2").exit_code == 0


@pytest.mark.parametrize("value", ["", "5", "30x", "m", "0s", "-1m", "1h 30m", "9" * 30 + "s"])
def test_malformed_time_limit_is_refused(run, engine, jsonl, value):
    result = run("generate", jsonl(*PROMPTS), "-o", "o.jsonl", "--time-limit", value)
    assert result.exit_code == 2
    assert "use a time such as 90s, 30m or 1h30m" in result.stderr


# -- failed rows ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet", "out"])
def test_retry_failed_runs_failed_rows_of_an_output_again(generate, engine, tmp_path, name):
    lines = [PROMPTS[0], {"prompt": "!fail one", "id": "x"}, PROMPTS[1], {"prompt": "!fail two"}]
    lines[0] = lines[0] | {"sampling": {"n": 2}}
    assert generate("", lines, name).exit_code == 1
    before = read_output(tmp_path / name)
    ran = []

    def heals(prompt, params):
        ran.append(bytes(prompt))
        return prompt if prompt[-1:] == list(b"o") else prompt[1:]

    engine.answering = heals
    result = generate("--retry-failed", lines, name)
    assert result.exit_code == 1
    assert sorted(ran) == [b"!fail one", b"!fail two"]
    after = read_output(tmp_path / name)
    assert [row["index"] for row in after] == [0, 0, 1, 2, 3]
    assert [row.get("error") for row in after] == [None, None, None, None, "its logits are not finite"]
    assert [row["token_ids"] for row in after if row["index"] in (0, 2)] == [
        row["token_ids"] for row in before if row["index"] in (0, 2)
    ]


@pytest.mark.parametrize("name", ["out.jsonl", "out"])
def test_retry_failed_without_an_earlier_output_is_refused(generate, engine, tmp_path, name):
    result = generate("--retry-failed", PROMPTS, name)
    assert result.exit_code == 2
    where = f"neither in {tmp_path}/{name} nor in {tmp_path}/{name}.partial; leave it out"
    assert f"--retry-failed: there are no failed rows, {where}" in result.stderr
    assert engine.built == []
    assert not list(tmp_path.glob("out*"))


def test_retry_failed_continues_a_partial_output(generate, tmp_path):
    lines = [{"prompt": "!fail"}, *PROMPTS]
    generate("--concurrency 1", lines, interrupt_after=3)
    result = generate("--retry-failed --concurrency 1", lines)
    assert "continuing: 2 of 7 are finished" in result.stderr
    assert result.exit_code == 1
    assert len(rows(tmp_path / "out.jsonl")) == 7


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "--temperature 0.5",
            "was made with another temperature (0.0 there, 0.5 now); only the same job can complete it",
        ),
        ("--overwrite", "keeps the rows of the output that succeeded; leave --overwrite out"),
    ],
)
def test_retry_failed_of_another_job_is_refused(generate, tmp_path, options, message):
    generate()
    before = (tmp_path / "out.jsonl").read_text()
    result = generate(f"--retry-failed {options}")
    assert result.exit_code == 2
    assert message in result.stderr
    assert (tmp_path / "out.jsonl").read_text() == before


def test_retry_failed_needs_the_record(generate, tmp_path):
    generate()
    (tmp_path / "out.jsonl.record.json").unlink()
    result = generate("--retry-failed")
    assert result.exit_code == 2
    assert "out.jsonl.record.json, which names the settings of its job" in result.stderr


@pytest.mark.parametrize("line", ["{", "5", '{"text": "a"}'])
def test_retry_failed_of_an_edited_output_is_refused(generate, tmp_path, line):
    generate()
    out = tmp_path / "out.jsonl"
    out.write_text(f"{line}\n{out.read_text()}")
    result = generate("--retry-failed")
    assert result.exit_code == 2
    assert "out.jsonl': has lines that this job did not write; use --overwrite" in result.stderr


@pytest.mark.parametrize("row", ['{"index": 1}', '{"index": 1, "samples": 5}', '{"index": 99, "error": "x"}'])
def test_edited_partial_output_is_refused(generate, tmp_path, row):
    generate("--concurrency 1", interrupt_after=2)
    partial = tmp_path / "out.jsonl.partial"
    partial.write_text(f"{partial.read_text()}{row}\n")
    result = generate("--concurrency 1")
    assert result.exit_code == 2
    assert "out.jsonl.partial:4': is not a row of this job; fix that line" in result.stderr


# -- object stores ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["in.jsonl", "in.json", "in.csv", "in.parquet"])
def test_input_and_output_on_an_object_store(generate, memory, tmp_path, name):
    table = datasets.Dataset.from_list(PROMPTS)
    if name.endswith(".json"):
        memory.pipe(f"/b/{name}", json.dumps(PROMPTS).encode())
    else:
        convert = {"csv": table.to_csv, "parquet": table.to_parquet, "jsonl": table.to_json}[name.partition(".")[2]]
        convert(tmp_path / name)
        memory.pipe(f"/b/{name}", (tmp_path / name).read_bytes())
    result = generate("", f"memory://b/{name}", "memory://b/out.jsonl")
    assert result.exit_code == 0, result.output
    found = [json.loads(line) for line in memory.cat("/b/out.jsonl").splitlines()]
    generate("", PROMPTS, "local.jsonl")
    assert found == rows(tmp_path / "local.jsonl")
    assert json.loads(memory.cat("/b/out.jsonl.record.json"))["workload"]["command"] == "generate"
    assert generate("--seed 5", f"memory://b/{name}", "memory://b/out.jsonl").exit_code == 2  # it exists
    assert generate("", f"memory://b/{name}", "memory://b/out.jsonl").exit_code == 0  # it is finished
    assert not list(tmp_path.glob("out-*"))


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_interrupted_job_on_an_object_store_continues(generate, memory, tmp_path, name):
    result = generate(out=f"memory://b/{name}", interrupt_after=2)
    assert result.exit_code == 130
    assert not memory.exists(f"/b/{name}")
    (partial,) = tmp_path.glob("out-*.partial")
    assert f"kept 2 finished of 6 in {partial.name}" in result.stderr
    result = generate(out=f"memory://b/{name}")
    assert "continuing: 2 of 6 are finished" in result.stderr
    assert memory.exists(f"/b/{name}")
    assert not list(tmp_path.glob("out-*"))


def test_failed_upload_keeps_the_rows(generate, memory, monkeypatch, tmp_path):
    def fails(*_, **__):
        raise OSError("quota exceeded")

    with monkeypatch.context() as patch:
        patch.setattr("specbatch.jobs.files.shutil.copyfileobj", fails)
        result = generate(out="memory://b/out.jsonl")
    assert result.exit_code == 2
    assert "the store reports: quota exceeded; run the same command again to retry" in result.stderr
    result = generate(out="memory://b/out.jsonl")
    assert "continuing: 6 of 6 are finished" in result.stderr
    assert result.exit_code == 0
    assert len(memory.cat("/b/out.jsonl").splitlines()) == 6


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("memory://b/none.jsonl", "the store reports: No such file"),
        ("nowhere://b/in.jsonl", "fsspec does not support nowhere://"),
        ("file:///nowhere/in.jsonl", "cannot be read (No such file or directory)"),
    ],
)
def test_unreadable_url_is_refused(generate, memory, source, message):
    result = generate("", source)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_missing_package_of_a_store_is_named(generate):
    fsspec.register_implementation("absent", "absentfs.AbsentFileSystem", errtxt="Install absentfs to access it")
    result = generate("", "absent://b/in.jsonl")
    assert result.exit_code == 2
    assert "absent:// needs another package (Install absentfs to access it), for example with pip" in result.stderr


def test_url_of_a_local_file_is_its_path(generate, tmp_path):
    generate()
    source, target = f"file://{tmp_path}/in.jsonl", f"file://{tmp_path}/url.jsonl"
    assert generate("", source, target).exit_code == 0
    assert rows(tmp_path / "url.jsonl") == rows(tmp_path / "out.jsonl")
    result = generate("--overwrite", source, f"file://{tmp_path}/in.jsonl")
    assert result.exit_code == 2
    assert "would replace the input" in result.stderr


# -- streaming, errors and signals ------------------------------------------------------------------------------------


def test_full_disk_is_one_line_and_keeps_finished_rows(generate, engine, monkeypatch, tmp_path):
    left = [1200]

    class Full:
        """A file on a disk with little room: the last write is cut."""

        def __init__(self, file):
            self._file = file

        def write(self, data):
            if not left[0]:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            taken = self._file.write(data[: left[0]])
            left[0] -= taken
            return taken

        def __getattr__(self, name):
            return getattr(self._file, name)

    locked = PartialRows._locked

    @contextmanager
    def full(self):
        with locked(self) as file:
            yield Full(file)

    with monkeypatch.context() as patch:
        patch.setattr(PartialRows, "_locked", full)
        result = generate("--max-new-tokens 3")
    assert result.exit_code == 1
    last = result.stderr.splitlines()[-1]
    assert "out.jsonl.partial cannot be written (No space left on device); make room" in last
    assert "; kept " in last
    assert "the same command continues" in last
    result = generate("--max-new-tokens 3")
    assert result.exit_code == 0
    assert [row["index"] for row in rows(tmp_path / "out.jsonl")] == list(range(6))


def test_line_that_is_too_long_is_malformed(generate, tmp_path):
    (tmp_path / "long.jsonl").write_text('{"prompt": "a"}\n{"prompt": "' + "x" * (17 << 20) + '"}\n{"prompt": "b"}\n')
    result = generate("", tmp_path / "long.jsonl")
    assert result.exit_code == 2
    assert "long.jsonl:2': longer than 16 MiB" in result.stderr
    assert generate("--skip-bad", tmp_path / "long.jsonl").exit_code == 0
    assert [row["index"] for row in rows(tmp_path / "out.jsonl")] == [0, 2]


def test_parquet_is_read_by_batches(generate, tmp_path):
    datasets.Dataset.from_list([{"prompt": "a"}] * (2 * BATCH + 1)).to_parquet(tmp_path / "in.parquet")
    assert generate("--max-new-tokens 1", tmp_path / "in.parquet", "out.parquet").exit_code == 0
    assert [row["index"] for row in read_output(tmp_path / "out.parquet")] == list(range(2 * BATCH + 1))


@pytest.mark.slow
def test_sigterm_ends_like_ctrl_c(tmp_path):
    """Batch systems send it before they kill."""
    prompts = "".join(json.dumps({"prompt": f"a{n}"}) + "\n" for n in range(3000))
    (tmp_path / "in.jsonl").write_text(prompts)
    words = "generate in.jsonl -o out.jsonl --model toy --load-format dummy --device cpu --max-model-len 64"
    command = [sys.executable, "-m", "specbatch", *words.split(), "--max-new-tokens", "40"]
    environment = os.environ | {"PYTHONPATH": str(Path(specbatch.__file__).parents[1])}
    running = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=environment)
    partial = tmp_path / "out.jsonl.partial"
    deadline = time.monotonic() + 120
    while not (partial.exists() and partial.read_bytes().count(b"\n") > 3) and time.monotonic() < deadline:
        time.sleep(0.1)
    running.send_signal(signal.SIGTERM)
    _, stderr = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "finished of 3000 in out.jsonl.partial; the same command continues" in stderr.splitlines()[-1]
