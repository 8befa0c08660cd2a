"""Separating reasoning from the answer."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from specbatch.text.thinking import Reasoning
from specbatch.text.tokenizer import ByteTokenizer, Tokenizer


@pytest.mark.parametrize(
    ("text", "opened", "answer"),
    [
        ("The answer is 4.", False, "The answer is 4."),
        ("<think>\n2 + 2 = 5?\n</think>\n\nThe answer is 4.", False, "The answer is 4."),
        ("2 + 2 = 5?\n</think>\n\n4", True, "4"),
        ("<think>a</think>b<think>c</think> d ", False, "d "),
        ("<think>\nIt may be 5", False, ""),
        ("It may be 5", True, ""),
        ("<think></think>", False, ""),
        (" 4", False, " 4"),
    ],
)
def test_answer_is_the_text_after_the_reasoning(text, opened, answer):
    assert Reasoning(ByteTokenizer(300)).answer_of(text, [*text.encode()], opened=opened) == answer


def test_template_can_open_the_reasoning():
    opened = Reasoning(ByteTokenizer(300)).is_opened_by
    assert opened("<|im_start|>assistant\n<think>\n")
    assert not opened("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not opened("What is <think>?")
    assert not opened("assistant\n[THINK]")


@pytest.mark.parametrize(
    ("names", "template", "prompt", "may"),
    [
        (["<think>", "</think>"], "{{ x.split('</think>') }}", "assistant\n", True),
        (["<think>", "</think>"], "{{ x.split('</think>') }}", "</think>a<user>b<assistant>\n", True),
        (["<think>", "</think>"], "{{ x.split('</think>') }}", "assistant\n<think>\n\n</think>\n\n", False),
        (["<think>", "</think>"], "{{ x }}", "assistant\n", False),
        (["<think>", "</think>"], None, "assistant\n", False),
        ([], "{{ x.split('</think>') }}", "assistant\n", False),
        (["[THINK]", "[/THINK]"], "[THINK]{{ x }}[/THINK]", "[INST]a[/INST]", True),
    ],
)
def test_answers_may_reason_without_an_opening_mark(names, template, prompt, may):
    assert Reasoning(with_tokens(*names, special=False, chat_template=template)).may_open(prompt) is may


def with_tokens(*names, special, **options):
    """A tokenizer of bytes and these tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({letter: place for place, letter in enumerate(letters)}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_tokens([AddedToken(name, special=special) for name in names])
    return Tokenizer(backend, name="t", **options)


GPT_OSS = ["<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|return|>"]


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize(
    ("names", "text", "answer"),
    [
        (["<think>", "</think>"], "<think>a\n</think>\n7", "7"),
        (["[THINK]", "[/THINK]"], "[THINK]a[/THINK]b[THINK]c[/THINK] 7", "7"),
        (["[THINK]", "[/THINK]"], "[THINK]a", ""),
        (["[THINK]", "[/THINK]"], "7", "7"),
        (["<seed:think>", "</seed:think>"], "<seed:think>a</seed:think>7", "7"),
        (["<|channel>", "<channel|>"], "<|channel>thought\na<channel|>7", "7"),
        (["<|channel>", "<channel|>"], "<|channel>thought\na", ""),
        (GPT_OSS, "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>7", "7"),
        (GPT_OSS, "<|channel|>final<|message|>7", "7"),
        (GPT_OSS, "<|channel|>analysis<|message|>a", ""),
    ],
)
def test_marks_of_the_vocabulary(names, text, answer, special):
    tokenizer = with_tokens(*names, special=special)
    reasoning, tokens = Reasoning(tokenizer), tokenizer.encode(text)
    assert reasoning.hidden == special
    assert reasoning.answer_of(tokenizer.decode(tokens, skip_special_tokens=True), tokens) == answer
    assert reasoning.answer_of(tokenizer.decode(tokens, skip_special_tokens=False), tokens) == answer


def test_marks_without_their_tokens_are_text():
    reasoning, text = Reasoning(ByteTokenizer(300)), "a [/THINK] b"
    assert reasoning.answer_of(text, [*text.encode()]) == text


@pytest.mark.parametrize("special", [True, False])
def test_end_that_the_user_names(special):
    tokenizer = with_tokens("</thought>", special=special)
    reasoning, tokens = Reasoning(tokenizer, "</thought>"), tokenizer.encode("a</thought> 7")
    assert reasoning.answer_of(tokenizer.decode(tokens), tokens) == "7"
    assert reasoning.answer_of("7", tokenizer.encode("7")) == "7"
