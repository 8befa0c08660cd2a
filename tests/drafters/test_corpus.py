"""Drafting from a corpus: a second run accepts nearly all drafts, whatever drafts beside it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from crossed import crossed, slow_but
from stand_ins import random_draft_lengths
from uncached import run_texts

from specbatch import Engine, SamplingParams, SpecbatchError, Speculation
from specbatch.drafters.corpus import Answer, _tables
from specbatch.drafters.corpus_files import plan_corpus

ENDLESS = SamplingParams(max_new_tokens=32, ignore_eos=True)
DRAFTERS = {
    "ngram": {"algorithm": "ngram"},
    "model": {"algorithm": "standalone", "draft": "toy-2"},
    "eagle3": {"algorithm": "eagle3", "draft": "dummy"},
    "dflash": {"algorithm": "dflash", "draft": "toy-block"},
}


def drafting(drafter: str = "ngram", schedule: str = "v2", **settings: Any) -> Speculation:
    return Speculation(**{"corpus": "run", "draft_tokens": 4, "schedule": schedule} | DRAFTERS[drafter] | settings)


def tokens_of(done: list[Any]) -> list[list[int]]:
    return [item.token_ids for item in done]


@pytest.mark.parametrize(("drafter", "schedule", "temperature"), crossed(DRAFTERS, ["v1", "v2"], [0.0, 0.9]))
def test_a_second_run_accepts_nearly_all_drafts(
    toy: Any, toy_engine: Callable[..., Engine], drafter: str, schedule: str, temperature: float
) -> None:
    """Its prompts are longer than n-grams, so that they, too, tell which answer follows."""
    prompts = [list(prompt) for prompt in toy.prompts() if len(prompt) >= 13][:3]
    params = [SamplingParams(**vars(ENDLESS) | {"temperature": temperature, "seed": n}) for n in range(len(prompts))]
    engine = toy_engine(speculation=drafting(drafter, schedule))
    first = tokens_of(engine.generate(prompts, params))
    engine.reset_record()
    assert tokens_of(engine.generate(prompts, params)) == first
    again = engine.record().metrics
    assert again["corpus_share"] > 0.95
    assert again["corpus_accept_rate"] > 0.9
    assert again["corpus_accept_length"] > 4.4  # of 5; the last verify of a request has fewer drafts

    engine.forget_prefixes()
    engine.reset_record()
    assert tokens_of(engine.generate(prompts[:2], params[:2])) == first[:2]
    assert (engine.record().metrics["corpus_share"] or 0.0) < 0.7  # what these two draft from each other


def test_tokens_of_seeds_are_those_of_the_baseline(toy: Any, toy_engine: Callable[..., Engine]) -> None:
    prompts = [list(prompt) for prompt in toy.prompts()[:8]]
    params = [SamplingParams(temperature=0.8, seed=n % 3, max_new_tokens=16) for n in range(8)]
    expected = tokens_of(toy_engine().generate(prompts, params))
    engine = toy_engine(speculation=drafting("model", corpus_min=1))
    assert [tokens_of(engine.generate(prompts, params)) for _ in range(2)] == [expected] * 2
    numbers = engine.record().metrics
    assert 0 < numbers["corpus_share"] < 1
    assert numbers["accepted_tokens"] > numbers["corpus_accept_rate"] * numbers["corpus_share"]


@pytest.mark.parametrize("draft_tokens", slow_but([3, "auto"], [1, 3, 5, "auto"]))
def test_a_draft_model_has_keys_for_tokens_that_the_corpus_drafted(
    toy: Any, toy_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, draft_tokens: Any
) -> None:
    """It drafted other tokens in their place."""
    most = draft_tokens
    if draft_tokens == "auto":
        random_draft_lengths(monkeypatch)
        most = 3
    steps = {"draft_steps": most}
    speculation = drafting("model", corpus_min=2, draft_tokens=draft_tokens, **steps)
    engine = toy_engine(speculation=speculation, page_size=1)
    prompts = [list(prompt) for prompt in toy.prompts()[:6]]
    engine.generate(prompts, ENDLESS)
    engine.parts.scheduler.forget_prefixes()
    engine.reset_record()
    done = engine.generate(prompts, ENDLESS)
    assert engine.record().metrics["corpus_accept_rate"] > 0.8
    drafter = engine.parts.worker.prefill_step.drafter._drafter  # type: ignore[attr-defined]
    texts = [(*item.prompt_token_ids, *item.token_ids) for item in done]
    _, fresh = run_texts(drafter.model, texts)
    for index, text in enumerate(texts, 1):
        path = engine.parts.scheduler.cache.path(list(text), len(text))  # type: ignore[union-attr]
        pages = torch.tensor([node.page for node in path])
        assert len(text) - most - 3 <= len(pages) < len(text)
        for ours, theirs in zip((*drafter.cache.k, *drafter.cache.v), (*fresh.k, *fresh.v), strict=True):
            torch.testing.assert_close(ours[pages, 0], theirs[index, : len(pages)], rtol=1e-4, atol=1e-5)


def test_running_requests_draft_from_each_other(toy: Any, toy_engine: Callable[..., Engine]) -> None:
    """The second of two equal requests begins late and catches up, while no answer is finished."""
    prompt, other = list(toy.prompts()[15]), list(toy.prompts()[3])
    engine = toy_engine(speculation=drafting(corpus_min=4), max_running=2)
    limits = [SamplingParams(max_new_tokens=count, ignore_eos=True) for count in (40, 20, 24)]
    done = engine.generate([prompt, other, prompt], limits)
    assert done[2].token_ids == list(toy.greedy(tuple(prompt)))[:24]
    late = done[2].metrics
    assert late.corpus_accepted >= 16
    assert late.verify_steps < 12


def test_only_complete_answers_are_added(toy: Any, toy_engine: Callable[..., Engine]) -> None:
    added: list[Answer] = []
    engine = toy_engine(speculation=drafting(), model="toy-nan", max_running=3)
    engine.parts.worker.add_answers = added.extend  # type: ignore[method-assign]
    prompts = [list(prompt) for prompt in toy.prompts()[16:19]]
    events = engine.stream([*prompts, [3, 36, 5]], SamplingParams(max_new_tokens=9, ignore_eos=True))
    for event in events:
        if event.index == 1:
            engine.abort(1)
    found = {tuple(answer.tokens[: answer.prompt]) for answer in added}
    assert found == {tuple(prompts[n][-16:]) for n in (0, 2)}
    assert all(len(answer.tokens) == answer.prompt + 9 for answer in added)


def test_tables_hold_answers_one_after_the_other() -> None:
    answers = [Answer([5, 6, 7, 8], 2), Answer([9], 0), Answer([1, 2, 3], 0), Answer(range(30), 1)]
    first, second, third = (table.tolist() for table in _tables(answers, 8))
    assert first == [[5, 6, 7, 8, -1, 9, -1], [0, 1, 1, 0, 0, 0, 0]]
    assert second == [[1, 2, 3, -1], [1, 1, 0, 0]]
    assert third == [[0, 1, 2, 3, 4, 5, 6, -1], [1, 1, 1, 1, 1, 1, 0, 0]]


# -- files -----------------------------------------------------------------------------------------------------------


def write(path: Path, *rows: Any) -> str:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return str(path)


def test_files_hold_what_generate_and_eval_wrote(open_toy: Callable[..., Any], tmp_path: Path) -> None:
    target, log = open_toy("toy"), list[str]()
    tokens, plain = [3, 4, 5, 2], [3, 4, 5]  # 2 ends the text "abc"
    generated = write(
        tmp_path / "out.jsonl",
        {"index": 0, "text": "abc", "token_ids": tokens, "finish_reason": "stop"},
        {"index": 1, "error": "failed", "text": None, "token_ids": None},
        "",
        {"index": 2, "text": "abc"},
        {"index": 3, "token_ids": [35, 33]},  # half of a character
        {"index": 4, "text": "", "token_ids": []},
    )
    batch = write(
        tmp_path / "batch.jsonl",
        {"custom_id": "a", "response": {"body": {"choices": [{"text": "abc"}, {"text": "cab"}]}}},
        {"custom_id": "b", "response": {"body": {"choices": [{"message": {"content": "abc"}}]}}},
    )
    folder = tmp_path / "eval"
    folder.mkdir()
    write(folder / "questions.jsonl", {"doc_id": 0, "question": "xyz" * 8, "text": "abc", "token_ids": tokens})
    lines = write(tmp_path / "lines.txt", "\ufeffabc", "", "cab")  # with a byte order mark
    names = (generated, batch, str(folder), lines)
    plan = plan_corpus(Speculation("ngram", corpus=", ".join(["run", *names])), target, log.append)
    assert plan is not None
    assert plan.given[:3] == [Answer(tokens, 0), Answer(plain, 0), Answer([35, 33], 0)]
    assert plan.given[3:6] == [Answer(plain, 0), Answer([5, 3, 4], 0), Answer(plain, 0)]
    question = [26, 27, 28] * 8
    assert plan.given[6:] == [Answer([*question[-16:], *tokens], 16), Answer(plain, 0), Answer([5, 3, 4], 0)]
    assert [line.split(" of ")[0] for line in log] == [f"corpus: {n} answers" for n in (3, 3, 1, 2)]
    assert plan_corpus(Speculation("ngram"), target, log.append) is None


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("{", "is not JSON (Expecting property name enclosed in double quotes at column 2)"),
        ('{"text": "a", "text": "b"}', 'has the key "text" more than once'),
        ([1], "is no JSON object"),
        ({"index": 0}, "must have token_ids"),
        ({"token_ids": [1.5]}, "must have token_ids"),
        ({"token_ids": [3], "text": 5}, "must have token_ids"),
        ({"text": "\ud800"}, "is not UTF-8"),
        ({"response": {"body": {}}}, "no line of an OpenAI batch output"),
        ({"token_ids": [3, 37]}, "has token 37, and toy has tokens 0 to 36: these answers are of another tokenizer"),
        ({"token_ids": [3, 4, 5], "text": "abd"}, "token_ids mean 'abc' to toy, and the text is 'abd'"),
    ],
)
def test_malformed_lines_are_refused_with_their_number(
    open_toy: Callable[..., Any], tmp_path: Path, row: Any, reason: str
) -> None:
    path = write(tmp_path / "out.jsonl", {"text": "abc"}, row)
    with pytest.raises(SpecbatchError, match=r"corpus='[^']*out.jsonl:2': ") as error:
        plan_corpus(Speculation("ngram", corpus=path), open_toy("toy"), print)
    assert reason in str(error.value)


def test_files_without_answers_are_refused(open_toy: Callable[..., Any], tmp_path: Path) -> None:
    empty = write(tmp_path / "empty.jsonl", "", {"error": "failed"})
    (tmp_path / "folder").mkdir()
    binary = tmp_path / "bytes.txt"
    binary.write_bytes(b"abc\n\xff\n")
    for name, reason in (
        (empty, "holds no answer"),
        (str(tmp_path / "none.jsonl"), "cannot be read"),
        (str(tmp_path / "folder"), "questions.jsonl': cannot be read"),
        (write(tmp_path / "out.csv", "text"), "is of no known format"),
        (str(binary), "bytes.txt:2': is not UTF-8"),
    ):
        with pytest.raises(SpecbatchError, match="use an output of generate") as error:
            plan_corpus(Speculation("ngram", corpus=name), open_toy("toy"), print)
        assert reason in str(error.value)


def test_an_engine_drafts_from_a_file(toy: Any, toy_engine: Callable[..., Engine], tmp_path: Path) -> None:
    prompts, log = [list(prompt) for prompt in toy.prompts()[:6]], list[str]()
    rows = [{"token_ids": list(toy.greedy(tuple(prompt)))} for prompt in prompts]
    path = write(tmp_path / "answers.jsonl", *rows)
    engine = toy_engine(log=log.append, speculation=drafting(corpus=path, corpus_tokens=1024))
    assert tokens_of(engine.generate(prompts, ENDLESS)) == [row["token_ids"][:32] for row in rows]
    record = engine.record()
    assert record.metrics["corpus_accept_rate"] > 0.8
    assert (record.caps["corpus_tokens"], record.caps["corpus_bytes"]) == (
        1024,
        28 * 1024 + 12 * engine.parts.worker.batch.tokens.numel(),
    )
    assert f"corpus: 6 answers of {path}, 240 tokens" in log
    many = write(tmp_path / "many.jsonl", *rows * 5)
    toy_engine(log=log.append, speculation=drafting(corpus=many, corpus_tokens=1024))
    assert "corpus: holds the last 1024 of 1230 tokens; raise --corpus-tokens to hold all" in log
