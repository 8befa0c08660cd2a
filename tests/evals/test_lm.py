"""The engine as a model of lm-eval: parameters, prompts, reasoning and errors of generation requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers
from lm_eval.api.instance import Instance
from lm_eval.models.utils import postprocess_generated_text

from specbatch import Engine, EngineConfig
from specbatch.core.sampling_params import SamplingParams
from specbatch.errors import SpecbatchError
from specbatch.evals.lm import SpecBatchLM
from specbatch.evals.options import MAX_NEW_TOKENS
from specbatch.text.chat_template import TemplateRefusal
from specbatch.text.tokenizer import ByteTokenizer, Tokenizer


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
    [({"temperature": 0.6}, 0.6, 0.9), ({"temperature": 0.0}, 0.0, 1.0), ({"top_p": 1.0}, 0.2, 1.0), ({}, 0.2, 0.9)],
)
def test_sampling_parameters_replace_the_tasks(
    make_engine: Any, chosen: dict[str, float], temperature: float, top_p: float
) -> None:
    params = params_of(make_engine, {"do_sample": True, "temperature": 0.2, "top_p": 0.9}, sampling=chosen)
    assert (params.temperature, params.top_p) == (temperature, top_p)
    assert params_of(make_engine, {"do_sample": False}, sampling={"temperature": 0.6}).temperature == 0.6


def test_answer_limit_of_user_task_and_default(make_engine: Any) -> None:
    assert params_of(make_engine, {}).max_new_tokens == MAX_NEW_TOKENS == 256
    assert params_of(make_engine, {"max_gen_toks": 32}).max_new_tokens == 32
    assert params_of(make_engine, {"max_gen_toks": 32}, max_new_tokens=7).max_new_tokens == 7


def test_stop_strings_that_are_tokens_are_stop_tokens_too(make_engine: Any) -> None:
    params = params_of(make_engine, {"until": ["Question:", "</s>", "<|im_end|>"]})
    assert params.stop == ("Question:", "</s>", "<|im_end|>")
    assert params.stop_token_ids == (258,)
    assert params_of(make_engine, {"until": "END"}).stop == ("END", "<|im_end|>")  # as in lm-eval, the eos token, too


def test_special_tokens_are_added_once(make_engine: Any) -> None:
    engine = make_engine(lambda prompt: "x")
    SpecBatchLM(engine, "toy").generate_until([ask("ab")])
    model = SpecBatchLM(engine, "toy", chat_template=True)
    model.generate_until([ask(model.apply_chat_template([{"role": "user", "content": "ab"}]))])
    plain, chat = (call["prompts"][0] for call in engine.calls)
    assert plain == [256, 97, 98]
    assert chat == [256, 257, *b"user\nab", 258, 10, 257, *b"assistant\n"]


def test_bos_token_of_rendered_chats(make_engine: Any) -> None:
    """Where the template does not begin with it, the tokenizer adds it, as for lm-eval's model for transformers."""

    def prompt(**options: Any) -> tuple[list[int], list[str]]:
        engine = make_engine(lambda prompt: "x")
        engine.tokenizer.chat_begin = ""
        model = SpecBatchLM(engine, "toy", chat_template=True, **options)
        model.generate_until([ask(model.apply_chat_template([{"role": "user", "content": "ab"}]))] * 2)
        return engine.calls[0]["prompts"][1], model.notes

    rendered = [257, *b"user\nab", 258, 10, 257, *b"assistant\n"]
    noted = (
        "the tokenizer begins chat prompts with '<s>', which the template does not, as in lm-eval; "
        "add_bos_token=False (--no-add-bos-token) leaves it out"
    )
    assert prompt() == ([256, *rendered], [noted])
    assert prompt(add_bos_token=True) == ([256, *rendered], [])
    assert prompt(add_bos_token=False) == (rendered, [])


def test_system_messages_that_the_template_refuses_are_left_out(make_engine: Any) -> None:
    engine = make_engine(lambda prompt: "x")
    render, roles = engine.tokenizer.apply_chat_template, []

    def refusing(messages: Any, **how: Any) -> str:
        roles.append([message["role"] for message in messages])
        if "tool" in roles[-1]:
            raise SpecbatchError("a limit")
        if {"system", "other"} & {*roles[-1]}:
            raise TemplateRefusal("no system")
        text: str = render(messages, **how)
        return text

    engine.tokenizer.apply_chat_template = refusing
    model = SpecBatchLM(engine, "toy", chat_template=True)
    system, user = ({"role": role, "content": role} for role in ("system", "user"))
    assert model.apply_chat_template([user]) == render([user])
    assert model.notes == []
    assert model.apply_chat_template([system, user]) == model.apply_chat_template([user])
    assert model.apply_chat_template([system, user, user, system]) == render([user, user])
    assert model.notes == ["the chat template refuses system messages: they were left out of 2 prompts, as in lm-eval"]
    for refused, times in (([system], 1), ([user | {"role": "other"}], 1), ([system, {"role": "other"}], 2)):
        roles.clear()
        with pytest.raises(TemplateRefusal):
            model.apply_chat_template(refused)
        assert len(roles) == times
    roles.clear()
    with pytest.raises(SpecbatchError, match="a limit"):
        model.apply_chat_template([system, {"role": "tool"}])
    assert len(roles) == 1


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
        "least 44, fewer examples (num_fewshot) or a smaller max_new_tokens; truncate_prompts drops the beginning, as "
        "lm-eval does"
    )
    assert len(engine.calls) == 1


def test_prompts_that_do_not_fit_lose_their_beginning_with_truncate_prompts(make_engine: Any) -> None:
    engine = make_engine(lambda prompt: "x", max_model_len=40)
    model = SpecBatchLM(engine, "toy", max_new_tokens=10, truncate_prompts=True)
    model.generate_until([ask("a" * 29), ask("a" * 30), ask("b" + "a" * 31)])
    assert engine.calls[0]["prompts"] == [[256, *[97] * 29], [97] * 30, [97] * 30]
    assert model.notes == ["2 prompts lost the beginning (truncate_prompts), because of max_model_len=40"]
    with pytest.raises(SpecbatchError, match=r"use at least 42, fewer examples .* or a smaller max_new_tokens$"):
        SpecBatchLM(engine, "toy", max_new_tokens=40, truncate_prompts=True).generate_until([ask("a")])


def test_arguments_without_an_effect_are_noted(make_engine: Any) -> None:
    model = SpecBatchLM(make_engine(lambda prompt: "x"), "toy")
    model.generate_until([ask("a", do_sample=False, temperature=0.7, top_p=0.9)] * 2 + [ask("b", temperature=0.5)])
    assert model.sampling is None
    assert model.notes == [
        "temperature=0.7 has no effect, because of do_sample=False; add do_sample=True",
        "top_p=0.9 has no effect, because answers are greedy",
        "some answers were made with other arguments: temperature 0.5",
        "lm-eval would apply transformers' default of top_k=50 (--top-k 50), and this run does not",
    ]


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
    assert passed == [{"continue_final_message": last, **switch} for last in (False, True)]


ARGUMENTS: list[dict[str, Any]] = [
    {"max_gen_toks": 12},
    {"max_new_tokens": 9, "do_sample": False, "temperature": 0.7},
    {"max_tokens": 14, "repetition_penalty": 1.8},
    {"max_completion_tokens": 16, "min_new_tokens": 15, "num_beams": 1},
    {"max_gen_toks": 12, "do_sample": False, "temperature": 0.0, "top_p": 0.5},
    {"max_gen_toks": 6, "max_new_tokens": 3},
]


@pytest.mark.slow
def test_prompts_and_answers_are_those_of_lm_evals_own_model(tiny: tuple[Path, Any, Any], hflm: Any) -> None:
    """Rendered chats with a bos token, the beginning of an answer, refused system messages, prompts that are too long,
    and every generation argument."""
    folder, model, tokenizer = tiny
    theirs = hflm(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=1)
    user, begun = {"role": "user", "content": " 12 th "}, {"role": "assistant", "content": "abc th "}
    chats = [([user], True), ([user, begun], False), ([{"role": "system", "content": "s"}, user, user], True)]
    with Engine(EngineConfig(model=str(folder), device="cpu", dtype="float32", max_running=3)) as engine:
        ours = SpecBatchLM(engine, "toy", chat_template=True, truncate_prompts=True)
        texts = [ours.apply_chat_template(*chat) for chat in chats]
        assert texts == [theirs.apply_chat_template(*chat) for chat in chats]
        free = theirs.generate_until([ask(texts[0], until=[], max_gen_toks=12)], disable_tqdm=True)[0]
        assert free[1].isascii()
        wanted = [{"until": until, **one} for one in ARGUMENTS for until in ([], [free[1], "<|im_end|>"])]
        asked = [ask(text, **one) for text in [*texts, "th 12" * 30] for one in wanted]
        assert ours.generate_until(asked) == theirs.generate_until(asked, disable_tqdm=True)
    assert ours.notes == [
        "the tokenizer begins chat prompts with '<s>', which the template does not, as in lm-eval; add_bos_token=False "
        "(--no-add-bos-token) leaves it out",
        "temperature=0.7 has no effect, because of do_sample=False; add do_sample=True",
        "some answers were made with other arguments: greedy, repetition-penalty 1.8",
        "some answers were made with other arguments: greedy, min-tokens 15",
        "top_p=0.5 has no effect, because answers are greedy",
        "max_gen_toks=6 counts and max_new_tokens=3 does not, as in lm-eval",
        "the chat template refuses system messages: they were left out of 1 prompt, as in lm-eval",
        f"{len(wanted)} prompts lost the beginning (truncate_prompts), because of max_model_len=64",
    ]


def test_end_of_text_token() -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "c": 2}))
    assert Tokenizer(backend, name="words", eos_ids=(2, 1)).eos_id == 1
    assert Tokenizer(backend, name="words", eos_ids=(2, 1), special_tokens={"eos_token": "c"}).eos_id == 2
    assert Tokenizer(backend, name="words").eos_id is None
    assert ByteTokenizer(300).eos_id == 256
