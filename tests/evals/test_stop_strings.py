"""Scored texts against lm-eval's stopping criteria and postprocessing, with given tokens of byte-fallback and
byte-level tokenizers."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from lm_eval.api.instance import Instance
from lm_eval.models.utils import handle_stop_sequences, postprocess_generated_text
from lm_eval.models.utils_hf import stop_sequences_criteria
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from specbatch.config.engine_config import EngineConfig
from specbatch.core.completion import Completion
from specbatch.core.request import Request
from specbatch.core.sampling_params import SamplingParams
from specbatch.evals.lm import SpecBatchLM
from specbatch.text.tokenizer import Tokenizer

SPECIAL, END = ["<s>", "</s>", "<|im_end|>", "<|sep|>"], 1
WORDS = ["xab", "ab", "b\n", "cat"]
BYTES = [*b"\n <>/sxabc", *"é。😀".encode(), 0xFF]
_LETTERS = pre_tokenizers.ByteLevel(add_prefix_space=False)
_AFTER = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
DECODERS: dict[str, Any] = {
    "byte fallback": decoders.Sequence(_AFTER),
    "byte fallback, first space": decoders.Sequence([*_AFTER, decoders.Strip(" ", 1, 0)]),
    "byte-level": decoders.ByteLevel(),
}


@cache
def backend(name: str) -> Backend:
    fallback = name != "byte-level"
    if fallback:
        words = [*WORDS, "▁", "▁a", "é", *(f"<0x{byte:02X}>" for byte in range(256))]
    else:
        words = [*("".join(piece for piece, _ in _LETTERS.pre_tokenize_str(word)) for word in WORDS), "Ġa"]
        words += sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {word: place for place, word in enumerate([*SPECIAL, *dict.fromkeys(words)])}
    found = Backend(models.BPE(vocabulary, [], byte_fallback=fallback))
    if not fallback:
        found.pre_tokenizer = _LETTERS
    found.decoder = DECODERS[name]
    found.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    found.add_tokens([AddedToken("<tool>")])
    return found


@cache
def token(name: str, what: str | int) -> int:
    """By its text, or its byte."""
    shown = Tokenizer(backend(name), name=name).shown_bytes
    assert shown is not None
    return shown.index(bytes([what]) if isinstance(what, int) else what.encode())


class GivenTokens:
    """An engine that answers with given tokens, some of them at once as a speculative step does."""

    def __init__(self, name: str, tokens: list[int], step: int) -> None:
        self.config = EngineConfig()
        self.tokenizer = Tokenizer(backend(name), name=name, eos_ids=(END,), special_tokens={"eos_token": "</s>"})
        self.caps = {"max_model_len": 1000}
        self._tokens, self._step = tokens, step

    def generate(self, prompts: list[list[int]], params: list[SamplingParams], **_: Any) -> list[Completion]:
        request = Request(
            0, prompts[0], params[0], end_tokens=self.tokenizer.eos_ids, submitted=0.0,
            decode=lambda ids: self.tokenizer.decode(ids, skip_special_tokens=params[0].skip_special_tokens),
            byte_tokens=self.tokenizer.byte_tokens,
        )  # fmt: skip
        for at in range(0, len(self._tokens), self._step):
            if not request.finished:
                request.append(self._tokens[at : at + self._step], 1.0)
        return [request.completion(1.0)]


def scored(name: str, tokens: list[int], until: list[str], *, step: int = 1) -> tuple[str, int]:
    """The text that is scored, and the number of its tokens. The answer may have as many tokens as are given."""
    model = SpecBatchLM(GivenTokens(name, tokens, step), "toy")  # type: ignore[arg-type]
    wanted = {"until": until, "max_gen_toks": len(tokens)}
    (text,) = model.generate_until([Instance("generate_until", {}, ("a", wanted), 0, metadata=("toy", 0, 1))])
    return text, len(model.answers[0].completion.token_ids)


def of_lm_eval(name: str, tokens: list[int], until: list[str]) -> tuple[str, int]:
    """The same with the functions of `HFLM.generate_until`, in the order in which it calls them."""
    theirs = PreTrainedTokenizerFast(tokenizer_object=backend(name), bos_token="<s>", eos_token="</s>")
    stops = handle_stop_sequences(list(until), theirs.eos_token)
    criteria = stop_sequences_criteria(theirs, stops, 0, 1)
    counts = range(1, len(tokens) + 1)
    ends = (n for n in counts if tokens[n - 1] == END or criteria(torch.tensor([tokens[:n]]), torch.zeros(1)).all())
    count = next(ends, len(tokens))
    return postprocess_generated_text(theirs.decode(tokens[:count], skip_special_tokens=True), stops, None), count


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize(
    ("answer", "until"),
    [
        (["cat", *"é".encode(), "cat"], ["é"]),
        (["cat", *"。".encode(), "cat"], ["。"]),
        (["cat", *"😀".encode(), "cat"], ["😀"]),
        (["cat", *"😀".encode()[:3]], ["😀"]),  # the limit
        (["cat", *"é".encode(), 0xC3], ["x"]),  # an invalid byte at the end
        (["cat", *"é".encode(), 0xC3, "</s>"], []),
        (["cat", *"😀".encode(), "cat"], ["\ufffd"]),
        (["cat", *"😀".encode(), "cat"], ["t\ufffd"]),
        (["cat", "b\n", *b"\n", "cat"], ["\n\n"]),
        (["xab", "cat"], ["xa"]),  # ends within a token
        (["xab", "cat"], ["ab", "xa"]),  # two in one token, which overlap
        (["xab", "cat"], ["xa", "ab"]),
        (["cat", "ab", "cat"], ["a", "ab"]),
        (["cat", "ab", "cat"], ["ab", "a"]),
        (["cat", *b"abc"], ["abc", "ab"]),
        (["cat", *b"abc"], ["cata", "ta", "tabc"]),
        (["cat", "<|im_end|>", "cat"], ["<|im_end|>"]),
        (["cat", "<|im_end|>", *b"\n", "cat"], ["<|im_end|>\n"]),
        (["cat", "<|im_end|>", *b"\n", "<|sep|>", "cat"], ["b", "<|im_end|>\n<|sep|>"]),
        (["cat", *b"a", "<|im_end|>", "b\n", "cat"], ["ab"]),  # only the scored text has it
        (["cat", "<|sep|>", "cat"], ["se"]),  # within the name of a special token
        (["cat", "<|sep|>", "cat"], ["|>c"]),
        (["cat", "<|sep|>", "cat"], ["t<"]),
        (["cat", "</s>"], ["s"]),  # within that of the end token
        (["cat", "<tool>", "cat"], ["<tool>"]),
        (["cat", *b"</s>", "cat"], ["x"]),  # the end token in letters
        (["cat", "</s>", "cat"], ["x"]),
        (["cat", "cat"], []),
    ],
)
def test_scored_text_is_that_of_lm_eval(name: str, answer: list[str | int], until: list[str]) -> None:
    tokens = [token(name, what) for what in answer]
    text, count = of_lm_eval(name, tokens, until)
    for step in (1, 2, 5):
        found = scored(name, tokens, until, step=step)
        assert found[0] == text
        assert found[1] <= count


STOPS = ["é", "。", "a", "aé", "ab", "xa", "b\n", "\n", "\n\n", "<|im_end|>", "<|im_end|>\n", "<tool>a", "\ufffd", " a"]


@pytest.mark.parametrize("name", DECODERS)
@examples(40)
@given(st.data())
def test_scored_text_of_any_tokens(name: str, data: st.DataObject) -> None:
    """Where both end with the same token. lm-eval looks for a stop string in the text of the last few tokens. If these
    begin within a run of byte tokens, it misses one, or sees one that the whole text does not have."""
    choices = [*SPECIAL[1:], *WORDS, "<tool>", *BYTES]
    tokens = [token(name, what) for what in data.draw(st.lists(st.sampled_from(choices), min_size=1, max_size=12))]
    until = data.draw(st.lists(st.sampled_from(STOPS), max_size=3))
    text, count = of_lm_eval(name, tokens, until)
    found = [scored(name, tokens, until, step=step) for step in (1, 4)]
    assert found[0] == found[1]
    if found[0][1] == count or (name == "byte-level" and "\ufffd" not in until):
        assert found[0][0] == text


@pytest.mark.parametrize(("answer", "until", "shown"), [("あい。う", "。", "あい"), ("😀\nabc", "\n", "😀")])
def test_stop_string_that_lm_eval_misses_or_sees_late(answer: str, until: str, shown: str) -> None:
    """After another character of byte tokens; the scored text is the same."""
    tokens = [token("byte fallback", byte) for byte in answer.encode()]
    ends = len((shown + until).encode())
    text, count = of_lm_eval("byte fallback", tokens, [until])
    assert (text, count > ends) == (shown, True)
    assert scored("byte fallback", tokens, [until]) == (shown, ends)
