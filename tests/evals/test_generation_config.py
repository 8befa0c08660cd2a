"""Values of a model's generation_config.json that lm-eval would apply: those that change what its own model answers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance

from specbatch.config.engine_config import EngineConfig
from specbatch.errors import SpecbatchError
from specbatch.evals.generation import parsed
from specbatch.evals.generation_config import NAME, TOP_K, generation_config, unapplied

# Key, value, and whether it changes answers of greedy and of sampled requests.
KEYS: list[tuple[str, Any, bool, bool]] = [
    ("max_new_tokens", 3, True, True),
    ("min_new_tokens", 9, True, True),
    ("min_length", 30, True, True),
    ("repetition_penalty", 2.5, True, True),
    ("no_repeat_ngram_size", 1, True, True),
    ("suppress_tokens", "first", True, True),
    ("begin_suppress_tokens", "first", True, True),
    ("bad_words_ids", "first", True, True),
    ("num_beams", 3, True, True),
    ("guidance_scale", 4.0, True, True),
    ("forced_eos_token_id", 40, True, True),
    ("encoder_repetition_penalty", 5.0, True, True),
    ("exponential_decay_length_penalty", [1, 500.0], True, True),
    ("do_sample", True, False, False),
    ("temperature", 0.1, False, False),
    ("max_length", 7, False, False),
    ("length_penalty", 3.0, False, False),
    ("early_stopping", True, False, False),
    ("use_cache", False, False, False),
    ("renormalize_logits", True, False, False),
    ("top_k", 2, False, True),
    ("top_p", 0.2, False, True),
    ("min_p", 0.6, False, True),
    ("typical_p", 0.2, False, True),
    ("epsilon_cutoff", 0.02, False, True),
    ("top_h", 0.2, False, True),
]


@pytest.mark.slow
@pytest.mark.parametrize("sampled", [False, True])
def test_values_that_lm_evals_own_model_applies(sampled: bool, tiny: tuple[Path, Any, Any], hflm: Any) -> None:
    _, model, tokenizer = tiny
    theirs = hflm(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=1)
    wanted = {"until": [], "max_gen_toks": 12, **({"do_sample": True, "temperature": 0.9} if sampled else {})}
    config = model.generation_config
    ends = config.eos_token_id

    def answer(**values: Any) -> str:
        before = {name: getattr(config, name, None) for name in values}
        torch.manual_seed(0)
        try:
            for name, value in values.items():
                setattr(config, name, value)
            request = Instance("generate_until", {}, ("12 th abc", dict(wanted)), 0)
            return str(theirs.generate_until([request], disable_tqdm=True)[0])
        finally:
            for name, value in before.items():
                setattr(config, name, value)

    torch.manual_seed(0)
    prompt = tokenizer("12 th abc", return_tensors="pt")["input_ids"]
    tokens = model.generate(prompt, max_new_tokens=4, do_sample=sampled, temperature=0.9)[0, prompt.shape[1] :]
    first, *_, fourth = tokens.tolist()
    for name, value, greedy_changes, sampled_changes in KEYS:
        given = {"first": [[first]] if name == "bad_words_ids" else [first]}.get(str(value), value)
        ends_early = {"eos_token_id": [ends, fourth]} if name in ("min_new_tokens", "min_length") else {}
        changes = sampled_changes if sampled else greedy_changes
        assert (answer(**ends_early, **{name: given}) != answer(**ends_early)) == changes, name
        lines = list(unapplied({"top_k": 0, name: given}, (), sampled=sampled))
        assert [name in line for line in lines] == [True] * changes, name
        assert not list(unapplied({"top_k": 0, name: given}, {name}, sampled=sampled))
    if sampled:
        assert answer(top_k=TOP_K) == answer() != answer(top_k=0)


def test_options_that_reproduce_a_value() -> None:
    values = {"repetition_penalty": 1.1, "top_k": 20, "top_p": 0.8, "temperature": 0.7, "no_repeat_ngram_size": 2}
    (greedy, other) = unapplied(values, (), sampled=False)
    assert greedy == (
        "lm-eval would apply repetition_penalty=1.1 (--gen-kwargs repetition_penalty=1.1) of the model's "
        "generation_config.json, and this run does not"
    )
    assert other.startswith(
        "lm-eval would apply no_repeat_ngram_size=2 of the model's generation_config.json, for which"
    )
    assert parsed(re.findall("--gen-kwargs ([^)]*)", greedy)[0]) == {"repetition_penalty": 1.1}
    (sampled, _) = unapplied(values, ("repetition_penalty",), sampled=True)
    assert "apply top_k=20 (--top-k 20), top_p=0.8 (--top-p 0.8) of" in sampled
    assert list(unapplied({}, (), sampled=True)) == [
        "lm-eval would apply transformers' default of top_k=50 (--top-k 50), and this run does not"
    ]
    assert not list(unapplied({"repetition_penalty": 1.0, "min_new_tokens": 0, "num_beams": 1}, (), sampled=False))


def test_the_file_of_a_model(tmp_path: Path) -> None:
    assert generation_config(EngineConfig(model=str(tmp_path))) == {}
    (tmp_path / NAME).write_text(json.dumps({"top_k": None, "top_p": 0.5}))
    assert generation_config(EngineConfig(model=str(tmp_path))) == {"top_p": 0.5}
    assert generation_config(EngineConfig(model=str(tmp_path), load_format="dummy")) == {}
    assert generation_config(EngineConfig(model="smollm2-135m")) == {}
    assert generation_config(EngineConfig(model="nobody/has-this@v1")) == {}
    (tmp_path / NAME).write_text("{")
    with pytest.raises(SpecbatchError, match=r"^model="):
        generation_config(EngineConfig(model=str(tmp_path)))
