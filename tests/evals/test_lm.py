"""The engine as a model of lm-eval: parameters, prompts, reasoning and errors of generation requests."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
from lm_eval.api.instance import Instance
from lm_eval.models.utils import postprocess_generated_text

from specbatch.core.request import SamplingParams
from specbatch.errors import SpecbatchError
from specbatch.evals.lm import MAX_NEW_TOKENS, SpecBatchLM
from specbatch.tokenizer import ByteTokenizer, Tokenizer


def ask(context: str, doc_id: int = 0, **wanted: Any) -> Instance:
    wanted = {"until": ["\n"], **wanted}
    return Instance("generate_until", {}, (context, wanted), 0, metadata=("toy", doc_id, 1))


def params_of(make_engine: Any, wanted: dict[str, Any], **options: Any) -> SamplingParams:
    engine, request = make_engine(lambda prompt: "x"), ask("a", **wanted)
    SpecBatchLM(engine, "toy", **options).generate_until([request])
    assert request.args[1] == {"until": ["\n"], **wanted}, "the task's arguments are not changed"
    params: SamplingParams = engine.calls[0]["params"][0]
    return params


def test_all_requests_go_to_the_engine_at_once_and_return_in_order(make_engine: Any) -> None:
    engine = make_engine(lambda prompt: f"<{prompt}>\nrest")
    seen: list[tuple[int, int]] = []
    model = SpecBatchLM(engine, "toy", concurrency=3, on_answer=lambda answer, n: seen.append((answer.doc_id, n)))
    texts = model.generate_until([ask("a", 10), ask("b", 20), ask("c", 30)])
    assert texts == ["<a>", "<b>", "<c>"]
    assert len(engine.calls) == 1
    assert engine.calls[0]["concurrency"] == 3
    found = [(answer.doc_id, answer.completion.text) for answer in model.answers]
    assert found == [(10, "<a>"), (20, "<b>"), (30, "<c>")]
    assert seen == [(30, 3), (20, 3), (10, 3)]  # as they finish
    assert model.prompts == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("wanted", "temperature", "top_p"),
    [
        ({}, 0.0, 1.0),
        ({"do_sample": False, "temperature": 0.0}, 0.0, 1.0),
        ({"do_sample": False, "temperature": 0.7}, 0.0, 1.0),
        ({"temperature": 0.7}, 0.7, 1.0),
        ({"do_sample": True}, 1.0, 1.0),
        ({"do_sample": True, "temperature": 0.2, "top_p": 0.9}, 0.2, 0.9),
    ],
)
def test_sampling_parameters_are_the_tasks(
    make_engine: Any, wanted: dict[str, Any], temperature: float, top_p: float
) -> None:
    params = params_of(make_engine, wanted)
    assert (params.temperature, params.top_p) == (temperature, top_p)


@pytest.mark.parametrize(
    ("chosen", "temperature", "top_p"),
    [({"temperature": 0.6}, 0.6, 0.9), ({"temperature": 0.0}, 0.0, 0.9), ({"top_p": 1.0}, 0.2, 1.0), ({}, 0.2, 0.9)],
)
def test_sampling_parameters_replace_the_tasks(
    make_engine: Any, chosen: dict[str, float], temperature: float, top_p: float
) -> None:
    params = params_of(make_engine, {"do_sample": True, "temperature": 0.2, "top_p": 0.9}, sampling=chosen)
    assert (params.temperature, params.top_p) == (temperature, top_p)
    assert params_of(make_engine, {"do_sample": False}, sampling={"temperature": 0.6}).temperature == 0.6


def test_answer_limit_of_user_task_and_default(make_engine: Any) -> None:
    assert params_of(make_engine, {}).max_new_tokens == MAX_NEW_TOKENS == 512
    assert params_of(make_engine, {"max_gen_toks": 32}).max_new_tokens == 32
    assert params_of(make_engine, {"max_gen_toks": 32}, max_new_tokens=7).max_new_tokens == 7


def test_stop_strings_that_are_tokens_are_stop_tokens_too(make_engine: Any) -> None:
    params = params_of(make_engine, {"until": ["Question:", "</s>", "<|im_end|>"]})
    assert params.stop == ("Question:", "</s>", "<|im_end|>")
    assert params.stop_token_ids == (258,)
    assert params_of(make_engine, {"until": "END"}).stop == ("END", "<|im_end|>")  # and the end token


def test_unknown_generation_arguments_are_refused(make_engine: Any) -> None:
    with pytest.raises(SpecbatchError, match="task='toy': sets num_beams"):
        params_of(make_engine, {"num_beams": 4})


def test_special_tokens_are_added_once(make_engine: Any) -> None:
    engine = make_engine(lambda prompt: "x")
    SpecBatchLM(engine, "toy").generate_until([ask("ab")])
    model = SpecBatchLM(engine, "toy", chat_template=True)
    model.generate_until([ask(model.apply_chat_template([{"role": "user", "content": "ab"}]))])
    plain, chat = (call["prompts"][0] for call in engine.calls)
    assert plain == [256, 97, 98]
    assert chat == [256, 257, *b"user\nab", 258, 10, 257, *b"assistant\n"]


def test_answer_that_the_task_begins_is_continued(make_engine: Any) -> None:
    model = SpecBatchLM(make_engine(lambda prompt: "x"), "toy", chat_template=True)
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "The answer is"}]
    text = model.apply_chat_template(turns, add_generation_prompt=False)
    assert text == "<s><|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\nThe answer is"


def test_prompts_that_do_not_fit_are_refused_first(make_engine: Any) -> None:
    engine = make_engine(lambda prompt: "x", max_model_len=40)
    fits, long, longest = ask("a" * 29, 3), ask("a" * 30, 4), ask("a" * 33, 7)  # and the <s>
    SpecBatchLM(engine, "toy", max_new_tokens=10).generate_until([fits])
    with pytest.raises(SpecbatchError) as refused:
        SpecBatchLM(engine, "toy", max_new_tokens=10).generate_until([fits, longest, long])
    assert str(refused.value) == (
        "max_model_len=40: question 7 of toy, the longest, has 34 prompt tokens and up to 10 answer tokens; use at "
        "least 44, fewer examples (num_fewshot) or a smaller max_new_tokens"
    )
    assert len(engine.calls) == 1


def test_answers_reach_lm_evals_cache(make_engine: Any) -> None:
    kept: list[tuple[Any, ...]] = []

    class Hook:
        def add_partial(self, *what: Any) -> None:
            kept.append(what)

    model = SpecBatchLM(make_engine(lambda prompt: prompt.upper()), "toy")
    model.cache_hook = Hook()
    model.generate_until([ask("a"), ask("b")])
    found = [(kind, args[0], text) for kind, args, text in kept]
    assert found == [("generate_until", "a", "A"), ("generate_until", "b", "B")]


def test_reasoning_is_not_scored_but_kept_in_the_answers(make_engine: Any) -> None:
    replies = {"a": "<think>7?</think> 8", "b<think>": "7?</think>9", "c": "10", "d": "<think>11?", "e<think>\n": "12?"}
    model = SpecBatchLM(make_engine(replies.__getitem__), "toy", chat_template=True)
    assert model.generate_until([ask(prompt) for prompt in replies]) == ["8", "9", "10", "", ""]
    assert [answer.completion.text for answer in model.answers] == list(replies.values())


@pytest.mark.parametrize(
    ("prompt", "reply", "until", "scored"),
    [
        ("q", "It is 7.\n\nQ", ["\n\n"], "It is 7."),
        ("q", "<think>a\n\nb</think>7.\n\nQ", ["\n\n"], "7."),
        ("q<think>\n", "a\n\nb</think>7.\n\nQ", ["\n\n"], "7."),
        ("q", "<think>a</think>\n\n7.", ["\n\n"], "7."),
        ("q", "\n<think>a</think>7.", ["\n", "<"], "7."),
        ("q", "<think>a</think>b\n\nc</think>7.", ["\n\n"], "7."),  # the last end counts
        ("q", "<think>Q: a</think>7. Q: b; A: c", ["A:", "Q:"], "7. "),
        ("q", "<think>a\n\nb", ["\n\n"], ""),
        ("q", "\n\n7.", ["\n\n"], ""),
    ],
)
def test_stop_strings_apply_to_the_answer(
    make_engine: Any, prompt: str, reply: str, until: list[str], scored: str
) -> None:
    model = SpecBatchLM(make_engine(lambda _: reply), "toy")
    (text,) = model.generate_until([ask(prompt, until=until)])
    assert text == scored
    if "<think>" in prompt + reply:
        assert model.answers[0].completion.text == reply
        ended = reply if "</think>" in reply else reply + "</think>"
        assert text == postprocess_generated_text(ended, until, "</think>")


@pytest.mark.parametrize(("chat_template", "closed"), [(True, ""), (True, "</think>\n\n"), (False, "")])
def test_reasoning_without_an_opening_mark(make_engine: Any, chat_template: bool, closed: str) -> None:
    """Stop strings end only what is no reasoning: the answer to a prompt that closed it, or to one of plain text."""
    reply = "a\n\nb</think>7.\n\nQ"
    engine = make_engine(lambda _: reply)
    engine.tokenizer.template_writes = lambda text: text == "</think>"
    engine.tokenizer.vocabulary = lambda: ["<think>", "</think>"]
    model = SpecBatchLM(engine, "toy", chat_template=chat_template)
    (text,) = model.generate_until([ask(f"q{closed}", until=["\n\n"])])
    reasons = chat_template and not closed
    assert text == ("7." if reasons else "a")
    assert model.answers[0].completion.text == (reply if reasons else "a")


def test_end_of_reasoning_that_the_user_names(make_engine: Any) -> None:
    def scored(reply: str) -> str:
        model = SpecBatchLM(make_engine(lambda _: reply), "toy", think_end_token="</thought>")
        (text,) = model.generate_until([ask("q", until=["\n\n"])])
        assert text == postprocess_generated_text(reply, ["\n\n"], "</thought>")
        return text

    assert scored("a\n\nb</thought>\n\n7.\n\nQ") == "7."
    assert scored("7.\n\nQ") == "7."


def test_words_of_the_vocabulary_are_no_stop_tokens(make_engine: Any) -> None:
    assert params_of(make_engine, {"until": ["byte7"]}).stop_token_ids == (258,)


@pytest.mark.parametrize(("thinking", "switch"), [(None, {}), (False, {"enable_thinking": False})])
def test_enable_thinking(make_engine: Any, thinking: bool | None, switch: dict[str, bool]) -> None:
    engine, passed = make_engine(lambda prompt: "x"), []
    engine.tokenizer.apply_chat_template = lambda messages, **options: passed.append(options) or "rendered"
    model = SpecBatchLM(engine, "toy", chat_template=True, thinking=thinking)
    model.apply_chat_template([{"role": "user", "content": "a"}])
    model.apply_chat_template([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], False)
    assert passed == [switch, switch]


def test_end_of_text_token() -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "c": 2}))
    assert Tokenizer(backend, name="words", eos_ids=(2, 1)).eos_id == 1
    assert Tokenizer(backend, name="words", eos_ids=(2, 1), special_tokens={"eos_token": "c"}).eos_id == 2
    assert Tokenizer(backend, name="words").eos_id is None
    assert ByteTokenizer(300).eos_id == 256
