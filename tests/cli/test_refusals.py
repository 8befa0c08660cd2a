"""Errors of the command line: exit status 2 and one line on standard error, before an engine is built.

Values that Python objects refuse as well are in tests/test_refusals.py, malformed prompts in tests/jobs.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import typer

from specbatch.cli.app import app
from specbatch.sweeps.run.loading import check_machine

GOOD = '{"prompt": "a"}'
OUT = "generate {in} -o {tmp}/o.jsonl"
HTTP = "sweep --engine http --base-url http://127.0.0.1:9"
EAGLE3 = "train-draft --model toy --load-format dummy --device cpu --algorithm eagle3"
DFLASH = EAGLE3.replace("eagle3", "dflash")
# The command ({in}: a file, {tmp}: a folder), a part of the message, and the lines of the file if not one good prompt.
REFUSED = [
    ("eval t --limit x", "limit='x': use a number (see "),
    ("eval t --temperature x", "temperature='x': use a number (see "),
    ("eval t --prefill-graph whole", "--prefill-graph='whole': use one of off, piecewise"),
    ("eval t --no-such-option", "No such option: --no-such-option (see "),
    ("sweep --spec v1", "No such option: --spec"),
    ("check --simulate-accept-length 2", "No such option: --simulate-accept-length"),
    ("--no-such-option", "No such option: --no-such-option ("),
    ("generate", "generate --help)"),
    ("no-such-command", "No such command 'no-such-command'"),
    ("eval t --spec v3", "spec='v3': use one of off, v1, v2"),
    ("eval t --algorithm eagle3 --draft x --aux-layers 2,b", "--aux-layers='2,b': write layers with commas"),
    ("eval t --device tpu", "device='tpu':"),
    ("eval t --limit 0", "limit=0:"),
    ("eval t --output {in}", "cannot be written (File exists)"),
    ("eval gsm8k --simulate-accept-length 2", "No such option: --simulate-accept-length"),
    ("eval t --output {tmp}", "this folder is not empty"),
    ("eval t --thinking", "--thinking: is a switch of the chat template; add --chat-template"),
    ("eval t --configs v2,v2+piecewise --prefill-graph piecewise", "--prefill-graph='piecewise': v2 and v2+piecewise"),
    ("eval t --configs v1 --spec v2", "spec='v2': --configs runs several; leave it out"),
    ("eval t --configs v1 --ablation", "configs='v1': --ablation is short for one; leave one of them out"),
    ("eval t --configs v1,v2 --concurrency 8 --max-running 4", "--max-running=4: concurrency 8 needs at least 8"),
    ("eval t --concurrency 1,8", "concurrency='1,8': one number, or several with --configs"),
    ("eval t --repeats 2", "repeats=2: goes with --configs; leave it out"),
    ("eval gsm8k --num-fewshot 0 --data {in}", "line 1 is not JSON", "[" * 100_000),
    ("eval gsm8k --num-fewshot 0 --data {in}", "line 1 has no text", '{"question": "\\ud800", "answer": "2"}'),
    ("eval one_digit_choices --spec v2", "algorithm='ngram': task one_digit_choices (multiple_choice) scores given"),
    (
        "eval one_digit_choices --ablation",
        "--ablation='baseline, v1, v2': task one_digit_choices (multiple_choice) scores",
    ),
    ("eval one_digit_choices --decode-graph whole", "--decode-graph='whole': task one_digit_choices"),
    ("sweep --concurrency 0", "concurrency=0:"),
    ("send-one --top-p 0.5", "--top-p=0.5: greedy answers are not sampled; add a temperature, such as --temperature="),
    (f"{EAGLE3} --data {{in}} --top-p 0.5", "--top-p=0.5: greedy answers are not sampled; add a temperature"),
    ("sweep --concurrency 1,-4", "concurrency=-4:"),
    ("sweep --concurrency 1,x", "concurrency='1,x':"),
    ("sweep --concurrency 1,1", "concurrency='1,1': 1 is given twice"),
    ("sweep --concurrency 8 --max-running 4", "--max-running=4: concurrency 8 needs at least 8"),
    ("sweep --configs baseline,v9", "configs='v9': use some of baseline, v1, v2"),
    ("sweep --configs v1,v1", "configs='v1,v1': v1 is given twice"),
    ("sweep --algorithm none", "algorithm='none': only the configuration baseline"),
    ("sweep --configs v2,v2+piecewise --prefill-graph piecewise", "--prefill-graph='piecewise': v2 and v2+piecewise"),
    ("sweep --repeats 0", "repeats=0:"),
    ("sweep --input-len 0", "--input-len=0:"),
    (
        "sweep --dataset gsm8k --input-len 128",
        "--input-len=128: goes with --dataset random, gsp, repository:FOLDER, documents:FOLDER and many-shot",
    ),
    ("sweep --output-len -1", "--output-len=-1:"),
    ("sweep --input-len 64-", "--input-len='64-': use a whole number of at least 1, or a range such as 64-256"),
    ("sweep --burst some", "burst='some': use a whole number of at least 1, or all"),
    ("sweep --burst 0", "burst=0:"),
    ("sweep --request-rate 0", "--request-rate='0': use requests per second above 0, or inf"),
    ("sweep --until-precise 2", "--until-precise='2': use a percentage above 0 and below 100, such as 2%"),
    ("sweep --until-precise 0%", "--until-precise='0%': use a percentage"),
    ("sweep --until-precise 2% --repeats 1", "repeats=1:"),
    ("sweep --until-precise 2% --most-repeats 2", "--most-repeats=2:"),
    ("sweep --most-repeats 5", "--most-repeats=5: goes with --until-precise"),
    ("sweep --until-precise 2% --configs v2", "--until-precise='2%': a ratio needs a configuration to compare with"),
    (f"{HTTP} --until-precise 2%", "--until-precise='2%': does not apply to a server, which has no baseline"),
    ("sweep --slo ttft=fast", "slo='ttft=fast': ttft takes seconds above 0, such as ttft=0.5"),
    ("sweep --prompts-per-concurrency 0", "--prompts-per-concurrency=0:"),
    ("sweep --dataset x", "dataset='x': use random, gsp, gsm8k, sharegpt, lm-eval:TASK, repository:FOLDER"),
    ("sweep --dataset {tmp}/none.jsonl", "No such file"),
    ("sweep --dataset random --data {in}", "goes with the data sets gsm8k"),
    ("sweep --dataset {in}", "in.jsonl:2': not JSON", GOOD, "{"),
    ("sweep --output {tmp}", "this folder is not empty"),
    ("sweep --output {in}/x", "cannot be written (Not a directory)"),
    ("sweep --base-url http://x", "--base-url='http://x': applies to servers only; add --engine http"),
    ("sweep --engine vllm", "engine='vllm': use specbatch, or http"),
    ("sweep --engine http", "--base-url='': give the server's address"),
    ("sweep --engine http --base-url http://me:pw@host:1", "--base-url='http://...@host': leave user and password out"),
    (f"{HTTP} --dry-run", "no answer from /v1/models"),
    (f"{HTTP} --draft-tokens 3", "--draft-tokens='3': does not apply to a server"),
    (f"{HTTP} --no-prefix-cache", "--no-prefix-cache: does not apply to"),
    (f"{HTTP} --configs v1", "configs='v1': does not apply to a server"),
    ("check --prompts 0", "prompts=0:"),
    ("check --input-len 0", "--input-len=0:"),
    ("check --max-new-tokens 0", "--max-new-tokens=0:"),
    ("check --concurrency 0", "concurrency=0:"),
    ("check --referee fp64", "referee='fp64':"),
    ("check --sampled --seeds 10", "seeds=10:"),
    ("check --spec v3", "spec='v3':"),
    ("check {tmp}/none.jsonl", "No such file"),
    ("check {in}", "in.jsonl:2': not JSON", GOOD, "{"),
    ("check --output {tmp}", "this folder is not empty"),
    ("generate {tmp}/none.jsonl -o {tmp}/o.jsonl", "No such file"),
    (OUT, "in.jsonl:3': not JSON", GOOD, "", "{"),
    (OUT, "prompt must be a string", '{"prompt": 7}'),
    (OUT, "has both prompt and question", '{"prompt": "a", "question": "b"}'),
    (OUT, "prompt_token_ids must be a list", '{"prompt_token_ids": [1, "a"]}'),
    (OUT, "prompt_token_ids must be a list", '{"prompt_token_ids": [true]}'),
    (OUT, "messages must be a list of", '{"messages": [{"role": "user"}]}'),
    (OUT, 'in.jsonl:2\': prompt="\\ud800" has half of a surrogate', GOOD, '{"prompt": "\\ud800"}'),
    (f"{OUT} --temperature -1", "temperature=-1.0:"),
    (f"{OUT} --stop=", "a stop string must not be empty"),
    (f"{OUT} --concurrency -2", "concurrency=-2:"),
    ("generate {in} -o {tmp}", "is a folder"),
    ("generate {in} -o {in}", "would replace the input"),
    ("generate {in} -o {in} --overwrite", "would replace the input"),
    ("generate {in} -o /dev/null", "already exists"),
    ("generate {in} -o {in}/o.jsonl", "cannot be written"),
    ("generate {in} -o {tmp}/notes", "is not the partial output of a job; name another output or pass --overwrite"),
    (f"{OUT} --corpus run", "corpus='run': nothing is drafted; add --algorithm"),
    ("send-one --prompt=", "prompt='': is empty"),
    ("send-one --max-new-tokens 0", "--max-new-tokens=0:"),
    ("gate {tmp}", "Missing option '--policy'"),
    ("report {tmp}", "holds no records of a sweep"),
    ("acceptance {tmp}/none", "none': no such file or folder"),
    (EAGLE3, "--data: give either --data (prompts) or --answers"),
    (f"{EAGLE3} --data {{in}} --answers {{in}}", "give either --data (prompts) or --answers"),
    (f"{EAGLE3} --data {{tmp}}/none.jsonl", "No such file"),
    (f"{EAGLE3} --data {{in}} --limit 0", "limit=0:"),
    (f"{EAGLE3} --data {{in}} --temperature -1", "temperature=-1.0:"),
    (f"{EAGLE3} --data {{in}} --vocab 100000", "vocab=100000: the target has"),
    (f"{EAGLE3} --data {{in}} --max-len 9000000 --batch-tokens 9000000", "positions; use at most that"),
    (f"{EAGLE3} --data {{in}} --dtype float16", "dtype='float16': small gradients underflow"),
    (f"{EAGLE3} --data {{in}} --out {{tmp}}", "this folder is not empty"),
    (f"{EAGLE3} --answers {{in}}", "in.jsonl:1': a row has prompt_token_ids and token_ids below"),
    (f"{EAGLE3} --answers {{in}} --max-new-tokens 3", "no prompts are answered in this run; leave out"),
    (
        f"{DFLASH} --data {{in}} --unroll 2",
        "unroll=2: algorithm 'dflash' has no such setting; it belongs to eagle, eagle3, peagle, mtp",
    ),
    (
        f"{EAGLE3.replace('eagle3', 'mtp')} --data {{in}}",
        "its head is stored with the target's files, and toy has none",
    ),
]


def command_of(words: str) -> Any:
    group = typer.main.get_command(app)
    return group.commands.get(words.split()[0], group)  # type: ignore[attr-defined]


@pytest.mark.parametrize("case", REFUSED, ids=[f"{row[0]} {row[2:]}"[:90] for row in REFUSED])
def test_error_before_an_engine_is_built(run, engine, jsonl, tmp_path, case):
    command, message, *lines = case
    source = jsonl(*lines or [GOOD])
    (tmp_path / "notes.partial").write_text("hello\n")
    result = run(*(word.replace("{in}", str(source)).replace("{tmp}", str(tmp_path)) for word in command.split()))
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert message in line
    flags = {name for item in command_of(command).params for name in (*item.opts, *item.secondary_opts)}
    if found := re.match(r"error: (-[a-z-]+)", line):
        assert found[1] in flags
    assert not re.search(r"(?<![\w.-])[a-z]+(_[a-z]+)+=", line), "a field of Python"
    assert engine.built == []
    assert not (tmp_path / "out").exists() or not any((tmp_path / "out").iterdir())  # no files are left


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--model no/x,no/x", "--model='no/x,no/x': no/x is given twice"),
        ("--model toy,toy-2 --load-format dummy", "--model='toy-2'"),
        ("--model toy,toy-2 --load-format dummy --max-model-len 20", "--max-model-len=20: question 0"),
    ],
)
def test_what_one_of_several_models_cannot_run_is_refused_before_any_runs(
    run, engine, monkeypatch, tmp_path, words, message
):
    monkeypatch.setattr("specbatch.sweeps.run.unloaded.check_machine", check_machine)
    command = f"eval one_digit_sums --limit 1 --concurrency 1 --configs baseline,v2 --device cpu {words}"
    result = run(*command.split(), "--output", tmp_path / "out")
    assert (result.exit_code, engine.built) == (2, [])
    assert message in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.slow  # all tasks of lm-eval are read
def test_unknown_task(run, engine):
    result = run("eval", "no_such_task")
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ")
    assert "no_such_task" in result.stderr
    assert engine.built == []


def test_concurrency_above_the_kv_pool(run, engine, tmp_path):
    engine.kv_pages = 90  # 128 + 128 tokens and the rows of two steps: 17 pages each
    result = run("sweep", "--concurrency", "1,8", "--input-len", 128, "--output-len", 128, "--output", tmp_path / "out")
    assert result.exit_code == 2
    assert "concurrency=8: baseline can hold 5 of these requests at once" in result.stderr
    assert engine.order == []
