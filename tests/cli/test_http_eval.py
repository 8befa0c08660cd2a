"""`specbatch eval --engine http`: a tiny model behind a server, and by itself, and servers that fail."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from called import call
from engine_server import EngineServer, serving_engine
from misbehaving_server import Misbehaviour, chunk, event, good_stream, head, misbehaving
from typer.testing import Result

LIMIT = 6
TASK = ("one_digit_sums", "--num-fewshot", 1, "--limit", LIMIT)


@pytest.fixture
def ask(server: EngineServer) -> Callable[..., Result]:
    """`ask(*words, out="out", exit_code=0)`: an evaluation of the server, by default of one_digit_sums."""

    def run(*words: object, out: str = "out", task: tuple[object, ...] = TASK, exit_code: int = 0) -> Result:
        with serving_engine(server) as url:
            own = ("--engine", "http", "--base-url", url, "--output", out)
            # The folder belongs to the address, which is another one in each call.
            return call("eval", *task, *own, *words, exit_code=exit_code)

    return run


def questions(folder: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(folder, "questions.jsonl").read_text().splitlines()]


def record(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(folder, "record.json").read_text())
    return found


def refusal(result: Result) -> str:
    """The only line of an error."""
    (line,) = (line for line in result.stderr.splitlines() if line.startswith("error"))
    return line


@pytest.mark.parametrize("send", ["text", "ids"])
def test_answers_are_those_of_the_engine(tiny, server, ask, send):
    folder, _ = tiny
    ask("--send", send, *(("--tokenizer", folder) if send == "ids" else ()))
    call("eval", *TASK, "--model", folder, "--device", "cpu", "--output", "ours")
    theirs, ours = questions("out"), questions("ours")
    assert [row["text"] for row in theirs] == [row["text"] for row in ours]
    assert any(row["text"] for row in ours)
    for name in ("prompt_hash", "scores", "filtered", "finish_reason", "output_tokens", "prompt_tokens"):
        assert [row[name] for row in theirs] == [row[name] for row in ours], name
    assert all("token_ids" not in row for row in theirs)
    found = record("out")
    assert (found["config"]["model"], found["caps"]["server_version"]) == ("org/tiny", "0.33.0")
    assert found["config"]["served_model"] == "org/tiny"
    assert "server (vllm 0.33.0) at http://127.0.0.1:" in found["config"]["server"]
    assert [row["index"] for row in map(json.loads, Path("out/requests.jsonl").read_text().splitlines())] == [*range(6)]
    assert "Model: org/tiny of a server (vllm 0.33.0)" in Path("out/summary.md").read_text()
    assert list(Path("out/org__tiny").glob("results_*.json"))
    assert {type(body["prompt"]) for _, body in server.bodies} == {str if send == "text" else list}

    compared = call("compare", "ours", "out").stdout
    assert "strict-match exact_match" in compared
    assert "differs: model: " in compared
    assert " -> org/tiny" in compared
    Path("gate.toml").write_text(
        '[accuracy]\nfilter = "strict-match"\nunparsed_at_most = 1.0\n[answers]\nequal = true\n'
    )
    call("gate", "out", "--policy", "gate.toml", "--baseline", "ours")


def test_texts_that_differ_are_not_equal(tiny, server, ask):
    folder, _ = tiny
    call("eval", *TASK, "--model", folder, "--device", "cpu", "--output", "ours")
    server.says = lambda text: f"{text[:3]}!"
    ask()
    Path("gate.toml").write_text("[answers]\nequal = true\n")
    result = call("gate", "out", "--policy", "gate.toml", "--baseline", "ours", exit_code=1)
    assert "first divergence: question 0, text from there: " in result.stdout


def test_thinking_on_and_off_of_a_server(server, ask):
    found = ask("--chat-template", "--compare-thinking")
    for mode, is_on in (("on", True), ("off", False)):
        assert record(f"out/thinking-{mode}")["workload"]["thinking"] is is_on
        assert len(questions(f"out/thinking-{mode}")) == LIMIT
    modes = [body["chat_template_kwargs"]["enable_thinking"] for _, body in server.bodies]
    assert modes == [True] * LIMIT + [False] * LIMIT
    assert found.stdout.count("| on ") >= 2


def test_chat_is_rendered_by_the_server(server, ask):
    ask("--chat-template", "--system-instruction", "Answer.", "--no-thinking")
    assert [path for path, _ in server.bodies] == ["/v1/chat/completions"] * LIMIT
    _, body = server.bodies[0]
    assert [message["role"] for message in body["messages"]] == ["system", "user", "assistant", "user"]
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert body["stop"] == ["\n\n", "Question:"]
    assert record("out")["workload"]["chat_template"]


def test_stop_strings_cut_after_reasoning_only(server, ask):
    server.says = lambda text: "2? \n\nQuestion: 3</think>\n\n7\n\nQuestion: 8"
    ask("--send", "chat")
    assert all("stop" not in body for _, body in server.bodies)
    assert [row["filtered"]["strict-match"] for row in questions("out")] == ["7"] * LIMIT
    assert "0 of 2 stop strings were sent, because answers may reason" in Path("out/summary.md").read_text()
    assert all("reasoning" not in row for row in questions("out"))

    server.splits = True
    ask("--send", "chat", out="split")
    assert [row["filtered"]["strict-match"] for row in questions("split")] == ["7"] * LIMIT
    assert {row["reasoning"] for row in questions("split")} == {"2? \n\nQuestion: 3"}
    assert {row["text"] for row in questions("split")} == {"\n\n7\n\nQuestion: 8"}


def test_reasoning_that_the_template_opened_and_the_limit_cut_is_no_answer(server, ask):
    server.says = lambda text: "hm</think>7" if len(server.bodies) % 2 else "7 and 7 and"
    ask("--send", "chat", "--concurrency", 1)
    assert sorted(row["filtered"]["strict-match"] for row in questions("out")) == ["7"] * 3 + ["[invalid]"] * 3


def test_sampling_is_sent_and_each_answer_has_its_seed(server, ask):
    kwargs = json.dumps({"repetition_penalty": 1.2, "min_new_tokens": 2, "do_sample": True})
    ask("--temperature", 0.8, "--top-p", 0.9, "--top-k", 5, "--seed", 3, "--gen-kwargs", kwargs, "--concurrency", 2)
    bodies = [body for _, body in server.bodies]
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "min_tokens")
    assert {tuple(body[name] for name in names) for body in bodies} == {(0.8, 0.9, 5, 0.0, 1.2, 0.0, 2)}
    assert len({body["seed"] for body in bodies}) == LIMIT
    first = {body["prompt"]: body["seed"] for body in bodies}
    ask("--temperature", 0.8, "--seed", 3, out="again")
    assert {body["prompt"]: body["seed"] for _, body in server.bodies[LIMIT:]} == first
    assert "seed 3" in Path("again/summary.md").read_text()


def test_failed_requests_are_asked_again_and_answers_are_not(server, ask):
    server.fails = lambda number: number in (1, 4, 6)
    ask("--concurrency", 1)
    prompts = [body["prompt"] for _, body in server.bodies]
    assert len(prompts) == LIMIT + 3
    assert prompts[6:8] == [prompts[1], prompts[4]]
    assert prompts[8] == prompts[1]
    assert record("out")["counters"]["errors"] == {"HTTP 503: overloaded": 3}
    assert record("out")["metrics"]["requests"] == len(questions("out")) == LIMIT


def test_answers_survive_a_server_that_dies(tiny, server):
    with serving_engine(server) as url:
        words = ("eval", *TASK, "--engine", "http", "--base-url", url, "--output", "out", "--concurrency", 2)
        server.fails = lambda number: number >= 4
        result = call(*words, exit_code=1)
        assert "2 of 6 requests without an answer: HTTP 503: overloaded (2); there is no score" in refusal(result)
        assert "kept the finished answers (4)" in result.stderr
        assert not Path("out/record.json").exists()
        asked = {body["prompt"] for _, body in server.bodies[:4]}
        server.bodies.clear()
        server.fails = lambda number: False
        result = call(*words)
        assert "continuing: 4 answers are finished" in result.stderr
        assert len(server.bodies) == 2
        assert not asked & {body["prompt"] for _, body in server.bodies}
        assert len(questions("out")) == record("out")["metrics"]["requests"] == LIMIT
        assert "is complete" in call(*words).stderr
        server.model = "org/another"
        assert "is not empty; name a new folder" in refusal(call(*words, exit_code=2))


def test_answers_survive_an_interruption(server):
    def interrupt(number: int) -> None:
        if number == 3:
            import _thread

            _thread.interrupt_main()

    server.before = interrupt
    with serving_engine(server) as url:
        words = ("eval", *TASK, "--engine", "http", "--base-url", url, "--output", "out", "--concurrency", 1)
        call(*words, exit_code=130)
        server.before = lambda number: None
        server.bodies.clear()
        call(*words)
    assert 2 <= len(server.bodies) <= 4
    assert len(questions("out")) == LIMIT


def test_answers_of_another_model_or_seed_are_not_continued(server):
    with serving_engine(server) as url:
        words = ("eval", *TASK, "--engine", "http", "--base-url", url, "--output", "out")
        server.fails = lambda number: number >= 4
        call(*words, exit_code=1)
        assert "another seed (0 there, 1 now)" in refusal(call(*words, "--seed", 1, exit_code=2))
        server.model = "org/other"
        assert "another model ('org/tiny' there, 'org/other' now)" in refusal(call(*words, exit_code=2))


def test_hung_up_streams_are_failures_in_one_line(server, tmp_path):
    streams = [head(), *good_stream(8)[:4]], [head(), event(chunk("x", tokens=99))], [b""]
    for place, steps in enumerate(streams):
        with misbehaving(Misbehaviour(completion=list(steps))) as url:
            words = ("--engine", "http", "--base-url", url, "--output", f"out{place}")
            result = call("eval", *TASK, *words, exit_code=1)
        assert "6 of 6 requests without an answer: " in refusal(result)
        assert not Path(f"out{place}").exists()


def test_many_failures_in_a_row_end_the_run(server, monkeypatch):
    monkeypatch.setattr("specbatch.evals.server_lm.MOST_IN_A_ROW", 3)
    server.fails = lambda number: True
    with serving_engine(server) as url:
        words = ("--engine", "http", "--base-url", url, "--output", "out", "--concurrency", 1)
        call("eval", *TASK, *words, exit_code=1)
    assert len(server.bodies) == 3


def test_likelihoods_are_those_of_the_engine(tiny, server, ask):
    folder, _ = tiny
    task = ("one_digit_choices", "--num-fewshot", 1, "--limit", 4)
    ask("--tokenizer", folder, "--concurrency", 2, task=task)
    call("eval", *task, "--model", folder, "--device", "cpu", "--max-model-len", 512, "--output", "ours")
    theirs, ours = questions("out"), questions("ours")
    assert [row["picked"] for row in theirs] == [row["picked"] for row in ours]
    for row, other in zip(theirs, ours, strict=True):
        assert row["scores"] == other["scores"]
        for one, same in zip(row["choices"], other["choices"], strict=True):
            assert one["logprob"] == pytest.approx(same["logprob"], abs=1e-4)
            assert one["is_greedy"] == same["is_greedy"]
    assert record("out")["metrics"]["scored_tokens"] == record("ours")["metrics"]["scored_tokens"]
    assert "none acc" in call("compare", "ours", "out").stdout


TASK_FILE = """
task: repeated
dataset_path: json
dataset_kwargs: {data_files: {test: rows.jsonl}}
output_type: generate_until
test_split: test
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
gen_prefix: "The answer is"
repeats: 3
generation_kwargs: {until: ["."], do_sample: true, temperature: 0.7, max_gen_toks: 8}
metric_list: [{metric: exact_match}]
"""


def test_repeats_have_their_own_seeds_and_answers_that_the_task_begins_are_continued(server, ask, tmp_path):
    rows = [{"question": f"{number}?", "answer": "1"} for number in range(2)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "repeated.yaml").write_text(TASK_FILE)
    ask("--chat-template", task=("repeated.yaml",))
    bodies = [body for _, body in server.bodies]
    assert len(bodies) == len({body["seed"] for body in bodies}) == 6
    assert all(body["messages"][-1] == {"role": "assistant", "content": "The answer is"} for body in bodies)
    assert all(body["continue_final_message"] and not body["add_generation_prompt"] for body in bodies)
    assert [(row["doc_id"], row["repeat"]) for row in questions("out")] == [(d, r) for d in (0, 1) for r in (0, 1, 2)]
    server.kind = "another"
    assert "which this server may not continue" in refusal(
        ask("--chat-template", task=("repeated.yaml",), out="other", exit_code=2)
    )


class Doubles:
    """A generator like those of reasoning-gym."""

    def __init__(self, size: int, seed: int) -> None:
        self.size = size

    def __getitem__(self, place: int) -> dict[str, Any]:
        return {"question": f"double {place}", "answer": str(2 * place), "metadata": {"number": place}}

    def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
        return 1.0 if answer == entry["answer"] else 0.25


@pytest.mark.parametrize("words", [(), ("--chat-template",)], ids=["text", "chat"])
def test_reasoning_gym_scores_the_answers_of_a_server(server, ask, use_packages, words):
    module, factory = ModuleType("reasoning_gym"), ModuleType("reasoning_gym.factory")
    factory.DATASETS = {"doubles": Doubles}
    module.create_dataset = lambda name, **kwargs: Doubles(**kwargs)
    use_packages({"reasoning_gym": module, "reasoning_gym.factory": factory})
    server.says = lambda text: " 2"
    ask("--limit", 4, "--max-new-tokens", 8, *words, task=("reasoning_gym:doubles",))
    scores = [value for row in questions("out") for of in row["scores"].values() for value in of.values()]
    assert sorted(scores) == [0.25, 0.25, 0.25, 1.0]
    _, body = server.bodies[0]
    assert "double " in (body["messages"][-1]["content"] if words else body["prompt"])


def test_several_tasks_of_both_kinds(tiny, server, ask):
    words = ("--num-fewshot", 0, "--limit", 2, "--tokenizer", tiny[0])
    ask(*words, task=("one_digit_sums", "one_digit_choices"))
    assert len(questions("out/one_digit_sums")) == len(questions("out/one_digit_choices")) == 2
    assert list(Path("out/org__tiny").glob("samples_*"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--chat-template", "--add-bos-token"), "--add-bos-token: the server tokenizes the prompts; use --send=ids"),
        (("--truncate-prompts",), "the server tokenizes the prompts; use --send=ids"),
        (("--send", "ids"), "--tokenizer.*that of the server's model org/tiny is not available here"),
        (("--kv-dtype", "fp8"), "--kv-dtype.*does not apply to a server"),
        (("--configs", "baseline"), "--configs.*does not apply to a server"),
        (("--ablation",), "--ablation.*does not apply to a server"),
        (("--model", "org/other"), "--model.*has org/tiny; name one, such as --model=org/tiny"),
        (("--gen-kwargs", "num_beams=2"), "num_beams=2"),
        (("--send", "smoke"), "--send.*use one of ids, text, chat"),
    ],
)
def test_refused_options(server, ask, words, message):
    assert re.search(message, refusal(ask(*words, exit_code=2)))
    assert not server.bodies


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "--tokenizer.*is not available here"),
        (("--tokenizer", "{folder}", "--send", "chat"), "one_digit_choices .multiple_choice. scores given texts"),
    ],
)
def test_refused_likelihoods(tiny, server, ask, words, message):
    words = tuple(word.format(folder=tiny[0]) for word in words)
    task = ("one_digit_choices", "--limit", 2)
    assert re.search(message, refusal(ask(*words, task=task, exit_code=2)))


def test_server_without_logprobs_of_prompts(tiny, server, ask):
    server.kind = "llamacpp"
    task = ("one_digit_choices", "--limit", 2)
    line = refusal(ask("--tokenizer", tiny[0], task=task, exit_code=2))
    assert "must give log-probabilities of prompts" in line
    assert "Tasks that generate answers work. Its answer: HTTP 400: Only no echo is supported" in line
    assert len(server.bodies) == 1


def test_llama_cpp_gets_its_own_names(server, ask):
    server.kind = "llamacpp"
    ask("--gen-kwargs", "repetition_penalty=1.3")
    assert {(body["repeat_penalty"], body["repeat_last_n"]) for _, body in server.bodies} == {(1.3, 2**20)}
    assert all("cache_prompt" not in body for _, body in server.bodies), "its prefix cache may be used"
    line = refusal(ask("--gen-kwargs", "min_new_tokens=3", out="min", exit_code=2))
    assert "llama.cpp's server has no such parameter" in line


def test_an_unknown_server_gets_four_stop_strings(server, ask):
    server.kind = "another"
    until = json.dumps({"until": ["aa", "bb", "cc", "dd", "2"]})
    server.says = lambda text: "12"
    ask("--gen-kwargs", until)
    assert {tuple(body["stop"]) for _, body in server.bodies} == {("aa", "bb", "cc", "dd")}
    assert {row["filtered"]["strict-match"] for row in questions("out")} == {"1"}
    assert "4 of 5 stop strings were sent, because servers may take no more" in Path("out/summary.md").read_text()


def test_keys_that_are_refused(server, ask, monkeypatch):
    server.key = "right"
    assert "name the environment variable with its key" in refusal(ask(exit_code=2))
    monkeypatch.setenv("KEY", "right")
    ask("--api-key-env", "KEY")
    assert "right" not in Path("out/record.json").read_text()


def test_key_that_only_answers_need(server, ask, monkeypatch):
    """The models of llama.cpp's server are public."""
    server.before = lambda number: setattr(server, "key", "right")
    line = refusal(ask("--concurrency", 1, exit_code=2))
    assert "--api-key-env" in line
    assert "HTTP 401" in line


def test_no_server():
    line = refusal(call("eval", *TASK, "--engine", "http", "--base-url", "http://127.0.0.1:9", exit_code=2))
    assert "--base-url" in line
    assert "is the server up?" in line
    line = refusal(call("eval", *TASK, "--base-url", "http://127.0.0.1:9", exit_code=2))
    assert "applies to servers only; add --engine http" in line
