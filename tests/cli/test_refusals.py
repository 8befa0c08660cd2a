"""Mistakes of the user are one-line errors with setting, value and what works, before an engine is built."""

from __future__ import annotations

import pytest

GOOD = '{"prompt": "a"}'
# command line ({in}: a file with the given lines, {tmp}: a folder) | the file's lines | part of the error message
REFUSED = [
    ("eval t --limit x", [], "Invalid value for '--limit'"),
    ("eval t --no-such-option", [], "No such option: --no-such-option (see "),
    ("generate", [], "generate --help)"),
    ("no-such-command", [], "No such command 'no-such-command'"),
    ("eval t --spec v3", [], "spec='v3': use one of off, v1, v2"),
    ("eval t --algorithm magic", [], "algorithm='magic': use one of none, ngram, standalone"),
    ("eval t --algorithm standalone", [], "draft=None:"),
    ("eval t --algorithm ngram --draft x", [], "draft='x':"),
    ("eval t --algorithm eagle3", [], "draft=None: algorithm 'eagle3' needs an EAGLE-3 head"),
    ("eval t --algorithm eagle3 --draft x --aux-layers 2,b", [], "aux_layers='2,b': write layers with commas"),
    ("eval t --algorithm mtp --draft-rope-theta 9", [], "draft_rope_theta=9.0: algorithm 'mtp' has no such setting"),
    ("eval t --concurrency 0", [], "concurrency=0:"),
    ("eval t --dtype int3", [], "dtype='int3': use one of"),
    ("eval t --device tpu", [], "device='tpu':"),
    ("eval t --limit 0", [], "limit=0:"),
    ("eval t --output {in}", [GOOD], "output="),
    ("eval t --output {tmp}", [GOOD], "this folder is not empty"),
    ("sweep --concurrency 0", [], "concurrency=0:"),
    ("sweep --concurrency 1,-4", [], "concurrency=-4:"),
    ("sweep --concurrency 1,x", [], "concurrency='1,x':"),
    ("sweep --concurrency 1,1", [], "concurrency='1,1':"),
    ("sweep --concurrency 8 --max-running 4", [], "max_running=4: concurrency 8 needs at least 8"),
    ("sweep --configs baseline,v9", [], "configs='v9': use some of baseline, v1, v2"),
    ("sweep --configs v1,v1", [], "configs='v1,v1':"),
    ("sweep --algorithm none", [], "algorithm='none': only the configuration baseline"),
    ("sweep --configs v2,v2+piecewise --prefill-graph piecewise", [], "prefill_graph='piecewise': v2 and v2+piecewise"),
    ("eval gsm8k --ablation --prefill-graph piecewise", [], "prefill_graph='piecewise': v2 and v2+piecewise"),
    ("sweep --repeats 0", [], "repeats=0:"),
    ("sweep --input-len 0", [], "input_len=0:"),
    ("sweep --output-len -1", [], "output_len=-1:"),
    ("sweep --input-len 64-", [], "input_len='64-': use a whole number of at least 1, or a range such as 64-256"),
    ("sweep --input-len 64-32", [], "input_len='64-32': the smaller number comes first; use 32-64"),
    ("sweep --dataset {in} --output-len 3-4", [GOOD], "answers of text end by themselves"),
    ("sweep --burst some", [], "burst='some': use a whole number of at least 1, or all"),
    ("sweep --burst 0", [], "burst=0:"),
    ("sweep --burst 8", [], "burst=8: give --request-rate"),
    ("sweep --burst all --request-rate 2", [], "request_rate=2.0: all prompts arrive at once"),
    ("sweep --dataset random --thinking", [], "thinking=True: random prompts are not text"),
    ("sweep --dataset {in} --no-thinking", [GOOD], "no prompt is rendered by a chat template"),
    ("eval t --thinking", [], "thinking=True: is a switch of the chat template; add --chat-template"),
    (
        "eval one_digit_choices --spec v2",
        [],
        "algorithm='ngram': task one_digit_choices (multiple_choice) scores given",
    ),
    (
        "eval one_digit_choices --ablation",
        [],
        "ablation=True: task one_digit_choices (multiple_choice) scores",
    ),
    ("eval one_digit_choices --decode-graph whole", [], "decode_graph='whole': task one_digit_choices"),
    ("eval one_digit_choices --max-new-tokens 9", [], "max_new_tokens=9: task one_digit_choices"),
    ("sweep --dataset lm-eval:one_digit_choices", [], "task='one_digit_choices': is of type multiple_choice"),
    ("sweep --base-url http://x", [], "base_url='http://x': applies to servers only; add --engine http"),
    ("sweep --engine vllm", [], "engine='vllm': use specbatch, or http"),
    ("sweep --engine http --dry-run --base-url http://127.0.0.1:9", [], "no answer from /v1/models"),
    ("sweep --engine http", [], "base_url='': give the server's address"),
    ("sweep --engine http --base-url http://x --draft-tokens 3", [], "draft_tokens='3': does not apply to a server"),
    ("sweep --engine http --base-url http://x --no-prefix-cache", [], "prefix_cache=False: does not apply to"),
    ("sweep --engine http --base-url http://x --configs v1", [], "configs='v1': does not apply to a server"),
    (
        "sweep --engine http --base-url http://127.0.0.1:9",
        [],
        "base_url='http://127.0.0.1:9': no answer from /v1/models",
    ),
    ("sweep --prompts-per-concurrency 0", [], "prompts_per_concurrency=0:"),
    (
        "sweep --dataset shakespeare",
        [],
        "dataset='shakespeare': use random, gsp, gsm8k, lm-eval:TASK or the path of a .jsonl file",
    ),
    ("sweep --dataset {tmp}/none.jsonl", [], "No such file"),
    ("sweep --dataset random --data {in}", [GOOD], "goes with --dataset gsm8k"),
    ("sweep --dataset {in}", [GOOD, "{"], "in.jsonl:2': not JSON"),
    ("sweep --output {tmp}", [GOOD], "this folder is not empty"),
    ("sweep --output {in}/x", [GOOD], "cannot be written (Not a directory)"),
    ("check --prompts 0", [], "prompts=0:"),
    ("check --input-len 0", [], "input_len=0:"),
    ("check --max-new-tokens 0", [], "max_new_tokens=0:"),
    ("check --concurrency 0", [], "concurrency=0:"),
    ("check --margin -0.1", [], "margin=-0.1: use 0 or a positive number"),
    ("check --margin nan", [], "margin=nan:"),
    ("check --spec v3", [], "spec='v3':"),
    ("check {tmp}/none.jsonl", [], "No such file"),
    ("check {in}", [GOOD, "{"], "in.jsonl:2': not JSON"),
    ("check --output {tmp}", [GOOD], "this folder is not empty"),
    ("generate {tmp}/none.jsonl -o {tmp}/o.jsonl", [], "No such file"),
    ("generate {in} -o {tmp}/o.jsonl", [], "has no prompts"),
    ("generate {in} -o {tmp}/o.jsonl", [GOOD, "", "{"], "in.jsonl:3': not JSON"),
    (
        "generate {in} -o {tmp}/o.jsonl",
        ["[1]"],
        "in.jsonl:1': write a JSON object with one of the keys prompt,",
    ),
    ("generate {in} -o {tmp}/o.jsonl", [GOOD, '{"text": "a"}'], "in.jsonl:2': write a JSON object"),
    ("generate {in} -o {tmp}/o.jsonl", ['{"prompt": ""}'], "in.jsonl:1': prompt is empty"),
    ("generate {in} -o {tmp}/o.jsonl", ['{"prompt": 7}'], "prompt must be a string"),
    ("generate {in} -o {tmp}/o.jsonl", ['{"prompt": "a", "question": "b"}'], "has both prompt and question"),
    ("generate {in} -o {tmp}/o.jsonl", ['{"prompt_token_ids": [1, "a"]}'], "prompt_token_ids must be a list"),
    ("generate {in} -o {tmp}/o.jsonl", ['{"prompt_token_ids": [true]}'], "prompt_token_ids must be a list"),
    ("generate {in} -o {tmp}/o.jsonl", ['{"messages": [{"role": "user"}]}'], "messages must be a list of"),
    ("generate {in} -o {tmp}/o.jsonl", ['{"prompt": "a", "id": [1]}'], "id must be a string or a number"),
    ("generate {in} -o {tmp}", [GOOD], "is a folder"),
    ("generate {in} -o {in}", [GOOD], "is the input"),
    ("generate {in} -o {in} --overwrite", [GOOD], "is the input"),
    ("generate {in} -o /dev/null", [GOOD], "already exists"),
    (
        "generate {in} -o {tmp}/o.jsonl",
        [GOOD, '{"prompt": "\\ud800"}'],
        "in.jsonl:2': prompt has half of a surrogate",
    ),
    ("generate {in} -o {tmp}/o.jsonl", ["[" * 100_000], "in.jsonl:1': not JSON that can be read (nested too deeply)"),
    ("eval gsm8k --num-fewshot 0 --data {in}", ["[" * 100_000], "line 1 is not JSON"),
    ("eval gsm8k --num-fewshot 0 --data {in}", ['{"question": "\\ud800", "answer": "2"}'], "line 1 has no text"),
    ("generate {in} -o {in}/o.jsonl", [GOOD], "cannot be written"),
    ("generate {in} -o {tmp}/o.jsonl --max-new-tokens 0", [GOOD], "max_new_tokens=0: use a whole number of at least 1"),
    ("generate {in} -o {tmp}/o.jsonl --temperature -1", [GOOD], "temperature=-1.0:"),
    ("generate {in} -o {tmp}/o.jsonl --top-p 0", [GOOD], "top_p=0.0:"),
    ("generate {in} -o {tmp}/o.jsonl --stop=", [GOOD], "a stop string must not be empty"),
    ("generate {in} -o {tmp}/o.jsonl --concurrency -2", [GOOD], "concurrency=-2:"),
    ("send-one --prompt=", [], "prompt='': is empty"),
    ("send-one --max-new-tokens 0", [], "max_new_tokens=0:"),
]


@pytest.mark.parametrize(("command", "lines", "says"), REFUSED, ids=[row[0] for row in REFUSED])
def test_errors_come_before_an_engine_is_built(run, engine, jsonl, tmp_path, command, lines, says):
    source = jsonl(*lines)
    result = run(*(word.replace("{in}", str(source)).replace("{tmp}", str(tmp_path)) for word in command.split()))
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert says in line
    assert engine.built == []
    assert not (tmp_path / "out").exists() or not any((tmp_path / "out").iterdir())  # no files are left


@pytest.mark.slow  # all tasks of lm-eval are read
def test_an_unknown_task(run, engine):
    result = run("eval", "no_such_task")
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ")
    assert "no_such_task" in result.stderr
    assert engine.built == []


def test_a_concurrency_that_the_kv_pool_cannot_hold(run, engine, tmp_path):
    engine.kv_pages = 90  # 128 + 128 tokens and the rows of two steps: 17 pages each
    result = run("sweep", "--concurrency", "1,8", "--input-len", 128, "--output-len", 128, "--output", tmp_path / "out")
    assert result.exit_code == 2
    assert "concurrency=8: baseline can hold 5 of these requests at once" in result.stderr
    assert engine.order == []


def test_a_prompt_longer_than_the_context_names_its_line(run, engine, jsonl, tmp_path):
    result = run("generate", jsonl(GOOD, {"prompt": "x" * 300}), "-o", tmp_path / "o.jsonl")
    assert result.exit_code == 2
    assert "in.jsonl:2': prompt 1='300 tokens': too long for the stub (--skip-bad leaves it out)" in result.stderr
    assert engine.order == []


def test_an_invalid_partial_output(run, jsonl, tmp_path):
    (tmp_path / "o.jsonl.partial").write_text("hello\n")
    result = run("generate", jsonl(GOOD), "-o", tmp_path / "o.jsonl")
    assert result.exit_code == 2
    assert "is not the partial output of a job; name another output or pass --overwrite" in result.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("sweep", "--repeats", "x"),
        ("nonsense",),
        ("generate",),
        ("sweep", "--spec", "v1"),
        ("check", "--simulate-accept-length", "2"),  # its output is not the model's
    ],
)
def test_usage_errors_exit_with_2_as_well(run, words):
    assert run(*words).exit_code == 2
