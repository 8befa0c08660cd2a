"""Special tokens of prompts and scored texts: those of lm-eval's own model for transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from checkpoints import tokenizer as bytes_and_merges
from tokenizers import processors

from specbatch.errors import SpecbatchError
from specbatch.evals.encoding import Encoding
from specbatch.text.tokenizer import Tokenizer

TEXTS = ["abc", "<s>abc", " <s>abc", "<|im_end|>abc", "<|im_start|>user\nabc<|im_end|>", ""]
BOS, END = "<s>", "<|im_end|>"


@pytest.mark.parametrize("key", [None, True, False])
@pytest.mark.parametrize("add_bos", [None, True, False])
@pytest.mark.parametrize("has_bos", [True, False])
@pytest.mark.parametrize("form", ["<s> $A", "<s> $A <|im_end|>", "$A <|im_end|>", None])
def test_special_tokens_are_those_of_lm_evals_model(
    form: str | None, has_bos: bool, add_bos: bool | None, key: bool | None, hflm: Any, tmp_path: Path
) -> None:
    """key: add_bos_token in tokenizer_config.json, which transformers 5 does not read beside tokenizer.json."""
    if not has_bos and (add_bos or key is not None or (form or "").startswith(BOS)):
        return
    backend = bytes_and_merges()
    if form is not None:
        special = [(name, backend.token_to_id(name)) for name in (BOS, END) if name in form]
        backend.post_processor = processors.TemplateProcessing(single=form, special_tokens=special)
    named = {"eos_token": END, **({"bos_token": BOS} if has_bos else {})}
    hf.PreTrainedTokenizerFast(tokenizer_object=backend, **named).save_pretrained(tmp_path)
    described = json.loads((tmp_path / "tokenizer_config.json").read_text())
    if key is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(described | {"add_bos_token": key}))
    model = hf.LlamaForCausalLM(
        hf.LlamaConfig(vocab_size=264, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    )
    given = {} if add_bos is None else {"add_bos_token": add_bos}
    theirs = hflm(
        pretrained=model, tokenizer=hf.AutoTokenizer.from_pretrained(tmp_path, **given), backend="causal",
        add_bos_token=add_bos,
    )  # fmt: skip
    ours = Encoding(Tokenizer.from_folder(tmp_path), add_bos, is_chat=False)
    for text in TEXTS:
        if text:
            tokens, _ = theirs.tok_batch_encode([text])
            assert ours.prompt(text) == tokens.to(torch.int64)[0].tolist(), text
        assert ours.scored(text) == theirs.tok_encode(text), text
    is_noted = add_bos is None and form is not None and form.endswith(END)
    works = "as in lm-eval; add_bos_token=False (--no-add-bos-token) leaves it out"
    adds = {None: "", "$A <|im_end|>": END, "<s> $A": BOS, "<s> $A <|im_end|>": BOS + END}[form]
    other = add_bos is None and ((key is True and not adds.startswith(BOS)) or (key is False and adds != ""))
    notes = ["prompts have the special tokens of tokenizer.json"] * other + [
        f"the tokenizer ends prompts with {END!r}, {works}"
    ] * is_noted
    assert len(ours.notes) == len(notes)
    assert all(map(str.startswith, ours.notes, notes))


def test_a_bos_token_that_the_tokenizer_does_not_have_is_refused(tmp_path: Path) -> None:
    hf.PreTrainedTokenizerFast(tokenizer_object=bytes_and_merges(), eos_token=END).save_pretrained(tmp_path)
    with pytest.raises(SpecbatchError, match=r"add_bos_token=True: .* has no bos token; leave it out"):
        Encoding(Tokenizer.from_folder(tmp_path), True, is_chat=False).prompt("a")
