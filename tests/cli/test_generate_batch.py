"""`specbatch generate` with OpenAI batch files: output and error file, defaults, interruptions."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from openai_types import ErrorLine, OutputLine

from specbatch.errors import refuse

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def request(name: str, url: str = TEXT, **body: Any) -> dict[str, Any]:
    prompt = {"messages": [{"role": "user", "content": name}]} if url == CHAT else {"prompt": name}
    return {"custom_id": name, "method": "POST", "url": url, "body": {"model": "stub", "max_tokens": 4} | prompt | body}


GOOD = [
    request("chat", CHAT),
    request("text"),
    request("several", prompt=["a", "bc"], n=2),
    request("samples", CHAT, n=3, temperature=0.5),
]
BAD = [
    "{",
    "5",
    request("tools", CHAT, tools=[{"type": "function"}]),
    request("text"),  # its id is that of another row
    request("long", prompt="x" * 300),  # the stub takes 256 tokens
    request("url") | {"url": "/v1/embeddings"},
    request("half") | {"custom_id": "half \ud83d"},
]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def results(folder: Path, name: str = "out.jsonl") -> list[Any]:
    """Both files without the times in them."""
    found = []
    for path in (folder / name, folder / f"{name}.errors.jsonl"):
        for row in lines(path):
            row["response"]["body"].pop("created", None)
            found.append(row)
    return found


@pytest.fixture
def generate(run, engine, jsonl, tmp_path):
    def call(rows, options="", out="out.jsonl", interrupt_after=None):
        engine.interrupt_after = interrupt_after
        return run("generate", jsonl(*rows), "-o", f"{tmp_path}/{out}", *options.split())

    return call


def test_limit_beyond_the_context_has_the_name_of_the_request(generate, engine, tmp_path):
    def check(prompt, params):
        raise refuse("max_new_tokens", params.max_new_tokens, "too many")

    engine.check = staticmethod(check)
    assert generate([request("a", max_tokens=900)]).exit_code == 1
    (failed,) = lines(tmp_path / "out.jsonl.errors.jsonl")
    assert failed["error"]["message"] == "body.max_tokens=900: too many"


def test_output_and_error_file_validate_and_have_each_row_once(generate, tmp_path):
    rows = [item for pair in zip(GOOD, BAD, strict=False) for item in pair] + BAD[len(GOOD) :]
    result = generate(rows)
    assert result.exit_code == 1
    assert (
        f"answers to 4 prompts in {tmp_path}/out.jsonl, 7 failed rows in {tmp_path}/out.jsonl.errors.jsonl"
        in result.stdout
    )
    done, failed = lines(tmp_path / "out.jsonl"), lines(tmp_path / "out.jsonl.errors.jsonl")
    for row in done:
        OutputLine.model_validate(row)
    for row in failed:
        ErrorLine.model_validate(row)
    assert [row["custom_id"] for row in done] == [row["custom_id"] for row in GOOD]
    # A lone surrogate is not text, and strict readers would refuse the file; the message has it escaped.
    assert [row["custom_id"] for row in failed] == [None, None, "tools", "text", "long", "url", "half \ufffd"]
    assert len({row["id"] for row in done + failed}) == len(rows)
    assert {row["response"]["status_code"] for row in failed} == {400}
    assert [row["error"]["message"][:8] for row in failed[:2]] == ["line 2: ", "line 4: "]
    assert failed[6]["error"]["message"].startswith('custom_id="half \\ud83d" has half of a surrogate pair')
    assert "body.tools" in failed[2]["error"]["message"]
    assert "is the id of an earlier row" in failed[3]["error"]["message"]
    assert "too long for the stub" in failed[4]["error"]["message"]
    assert "5 of" not in result.stderr


def test_choices_and_usage(generate, tmp_path):
    assert generate(GOOD).exit_code == 0
    assert not (tmp_path / "out.jsonl.errors.jsonl").exists()
    chat, text, several, samples = (row["response"]["body"] for row in lines(tmp_path / "out.jsonl"))
    assert (chat["object"], text["object"]) == ("chat.completion", "text_completion")
    assert text["choices"] == [{"index": 0, "text": "uvwx", "logprobs": None, "finish_reason": "length"}]
    assert text["usage"] == {"prompt_tokens": 4, "completion_tokens": 4, "total_tokens": 8}
    assert [choice["text"] for choice in several["choices"]] == ["bcde", "bcde", "defg", "defg"]
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2, 3]
    assert several["usage"] == {"prompt_tokens": 3, "completion_tokens": 16, "total_tokens": 19}
    assert [choice["message"]["role"] for choice in samples["choices"]] == ["assistant"] * 3
    assert samples["usage"]["prompt_tokens"] == len("<user>samples<assistant>")


def test_sampling_of_each_request_reaches_the_engine(generate, engine):
    seen = {}
    engine.answering = lambda prompt, params: seen.update({bytes(prompt): params}) or prompt
    rows = [request("a", seed=5), request("b", CHAT, max_tokens=None), request("c", max_tokens=None, top_p=0.5)]
    assert generate(rows).exit_code == 0
    a, b, c = (seen[prompt] for prompt in (b"a", b"<user>b<assistant>", b"c"))
    assert (a.temperature, a.seed, a.max_new_tokens) == (1.0, 5, 4)
    assert b.max_new_tokens == 256 - len("<user>b<assistant>")  # what is left of the context, as in OpenAI's API
    assert (c.max_new_tokens, c.top_p) == (16, 0.5)
    assert len({a.seed, b.seed, c.seed}) == 3
    seen.clear()
    assert generate(rows, "--temperature 0 --max-new-tokens 7 --overwrite").exit_code == 0
    a, b, c = (seen[prompt] for prompt in (b"a", b"<user>b<assistant>", b"c"))
    assert {params.temperature for params in (a, b, c)} == {0.0}
    assert [params.max_new_tokens for params in (a, b, c)] == [4, 7, 7]


def test_other_model_names_are_reported_once(generate):
    rows = [request(str(n), model=f"gpt-{n}") for n in range(5)]
    result = generate(rows)
    assert result.exit_code == 0
    shown = [line for line in result.stderr.splitlines() if line.startswith("model: ")]
    assert shown == ["model: the requests name gpt-0, gpt-1, gpt-2; all of them run on smollm2-135m"]


def test_prompt_that_fails_while_it_runs_is_a_server_error(generate, tmp_path):
    assert generate([request("!fail"), request("b")], "--max-failures 1").exit_code == 0
    (row,) = lines(tmp_path / "out.jsonl.errors.jsonl")
    ErrorLine.model_validate(row)
    assert (row["response"]["status_code"], row["error"]["code"]) == (500, "server_error")
    assert row["error"]["message"] == "its logits are not finite"


def mixed(count: int, bad: int, seed: int) -> list[Any]:
    """Requests of all kinds in random order, `bad` of them bad."""
    chance = random.Random(seed)
    rows: list[Any] = []
    for n in range(count - bad):
        url = chance.choice((CHAT, TEXT))
        body: dict[str, Any] = {"max_tokens": chance.randint(1, 6), "temperature": chance.choice((0, 0.8, 1.3))}
        body |= {"n": 2} if chance.random() < 0.1 else {}
        body |= {"prompt": [f"p{n}", f"q{n}"]} if url == TEXT and chance.random() < 0.2 else {}
        rows.append(request(f"row-{n}", url, **body))
    wrong = ("{", request("dup-0", n=0), request("t", tools=[1]), request("p", CHAT, presence_penalty=3), "[]")
    rows += [wrong[n % len(wrong)] for n in range(bad)]
    chance.shuffle(rows)
    return rows


def test_interrupted_batch_has_the_result_of_an_uninterrupted_one(generate, tmp_path):
    rows = mixed(60, 6, 3)
    generate(rows, out="once.jsonl")
    for interrupt_after in (9, 13, 20):
        result = generate(rows, interrupt_after=interrupt_after, options="--concurrency 8")
        assert result.exit_code == 130
        assert not (tmp_path / "out.jsonl").exists()
    assert generate(rows, "--concurrency 8").exit_code == 1
    assert results(tmp_path) == results(tmp_path, "once.jsonl")
    assert len(results(tmp_path)) == 60


def test_retry_failed_runs_only_the_rows_of_the_error_file(generate, engine, tmp_path):
    rows = [request("a"), request("!fail"), request("tools", tools=[1]), request("b"), request("!fail2")]
    assert generate(rows).exit_code == 1
    before = lines(tmp_path / "out.jsonl")
    seen = []

    def heals(prompt, params):
        seen.append(bytes(prompt))
        return prompt[1:] if prompt[:1] == [ord("!")] else prompt

    engine.answering = heals
    result = generate(rows, "--retry-failed")
    assert result.exit_code == 1
    assert sorted(seen) == [b"!fail", b"!fail2"]
    after = lines(tmp_path / "out.jsonl")
    assert [row["custom_id"] for row in after] == ["a", "!fail", "b", "!fail2"]
    assert [row for row in after if row in before] == before
    assert [row["custom_id"] for row in lines(tmp_path / "out.jsonl.errors.jsonl")] == ["tools"]


@pytest.mark.parametrize("output", ["out.parquet", "out"])
def test_output_must_be_jsonl(generate, output):
    result = generate(GOOD, out=output)
    assert result.exit_code == 2
    assert "the output of an OpenAI batch is JSONL; name a .jsonl file" in result.stderr


def test_compare_refuses_an_output_without_numbers(generate, run, tmp_path):
    assert generate(GOOD).exit_code == 0
    result = run("compare", tmp_path / "out.jsonl", tmp_path / "out.jsonl")
    assert result.exit_code == 2
    assert "is the output of an OpenAI batch" in result.stderr
