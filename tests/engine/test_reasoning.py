"""Reasoning and answer of a request are counted apart, by the end of reasoning among its tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import SPECIAL
from letters import LETTERS, letters_engine, write_letters

from specbatch import Engine, EngineConfig, SamplingParams, Speculation
from specbatch.core.completion import RequestMetrics

MARKS = ["<think>", "</think>"]
PARTS = (
    *("mean_reasoning_tokens", "mean_answer_tokens", "reasoning_accept_length", "answer_accept_length"),
    *("reasoning_accept_rate", "answer_accept_rate"),
)
# What is answered, whether the prompt opens reasoning, and how much of it is reasoning.
ANSWERS = [
    ("<think>abababababab</think>cdcdcdcdcd", False, "<think>abababababab</think>"),
    ("abababababab</think>cdcdcdcdcd", True, "abababababab</think>"),
    ("</think>cdcdcdcdcd", True, "</think>"),
    ("<think>ab</think>cdcdcd</think>cd", False, "<think>ab</think>"),
    ("ababababab", True, "ababababab"),
    ("<think>ababababab", False, "<think>ababababab"),
    ("cdcdcdcdcdcd", False, ""),
]


def forced(text: str) -> SamplingParams:
    """Answers with a text, in which marks are tokens of their own and not spelled."""
    first = len(LETTERS) + len(SPECIAL)
    return SamplingParams(regex=text, max_new_tokens=60, logit_bias={first + place: 50 for place in range(len(MARKS))})


@pytest.fixture(scope="module", params=["off", "v1", "v2"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = write_letters(tmp_path_factory.mktemp("letters") / "model", marks=MARKS)
    drafts = Speculation("none", schedule="v2")
    if request.param != "off":
        drafts = Speculation("ngram", draft_tokens=3, ngram_min=1, schedule=request.param)
    config = EngineConfig(model=str(folder), device="cpu", dtype="float32", max_model_len=128, speculation=drafts)
    with Engine(config) as found:
        yield found


@pytest.mark.parametrize(("text", "opened", "reasoning"), ANSWERS)
def test_parts_of_an_answer(engine: Engine, text: str, opened: bool, reasoning: str) -> None:
    """Compared with the tokens of each verify, as the stream shows them."""
    prompt = "ab<|im_start|>x\n" + ("<think>\n" if opened else "")
    events = list(engine.stream([prompt], forced(text)))
    done = next(event.completion for event in events if event.completion is not None)
    assert done.text == text
    metrics, tokens = done.metrics, engine.tokenizer.encode(reasoning)
    # An answer that ends within its reasoning has its end token there.
    assert metrics.reasoning_tokens == len(tokens) + bool(tokens and text == reasoning and not text.endswith(MARKS[1]))
    verifies, emitted, seen = defaultdict[bool, int](int), defaultdict[bool, int](int), 0
    for event in events:
        if seen and event.token_ids:  # the first token is that of the prompt
            part = seen < metrics.reasoning_tokens
            verifies[part] += 1
            emitted[part] += len(event.token_ids)
        seen += len(event.token_ids)
    assert (metrics.reasoning_verifies, metrics.answer_verifies) == (verifies[True], verifies[False])
    assert (metrics.reasoning_emitted, metrics.answer_emitted) == (emitted[True], emitted[False])
    for name in ("drafted", "accepted"):
        assert getattr(metrics, f"reasoning_{name}") + getattr(metrics, f"answer_{name}") == getattr(metrics, name)


def test_metrics_of_a_run(engine: Engine) -> None:
    def measured(answers: list[tuple[str, bool, str]]) -> dict[str, float | None]:
        engine.reset_record()
        prompts = ["ab<|im_start|>x\n" + ("<think>\n" if opened else "") for _, opened, _ in answers]
        done = engine.generate(prompts, [forced(text) for text, _, _ in answers])
        assert [item.text for item in done] == [text for text, _, _ in answers]
        rows.extend(item.metrics for item in done)
        return engine.record().metrics

    rows = list[RequestMetrics]()
    plain = measured(ANSWERS[-1:])
    assert {plain[key] for key in PARTS} == {None}
    rows.clear()
    metrics = measured(ANSWERS)

    def ratio(top: str, bottom: str) -> float | None:
        found = sum(getattr(row, bottom) for row in rows)
        return sum(getattr(row, top) for row in rows) / found if found else None

    for part in ("reasoning", "answer"):
        assert metrics[f"{part}_accept_length"] == ratio(f"{part}_emitted", f"{part}_verifies")
        assert metrics[f"{part}_accept_rate"] == ratio(f"{part}_accepted", f"{part}_drafted")
    reasoned, output = (sum(getattr(row, name) for row in rows) for name in ("reasoning_tokens", "output_tokens"))
    assert metrics["mean_reasoning_tokens"] == reasoned / len(ANSWERS)
    assert metrics["mean_answer_tokens"] == pytest.approx((output - reasoned) / len(ANSWERS))


def test_model_without_marks(tmp_path: Path) -> None:
    folder = write_letters(tmp_path / "model")
    with letters_engine(folder) as engine:
        (done,) = engine.generate(["ab"], SamplingParams(regex="<think>ab</think>cd", max_new_tokens=60))
        assert (done.metrics.reasoning_tokens, done.metrics.answer_verifies) == (0, 0)
