"""Gemma 3 270M as a GGUF file, with the tokens, weights, logits and answers that transformers has from the same file.

SPECBATCH_GEMMA3_270M names the file; accelerate, which transformers needs for GGUF files, must be installed:

    SPECBATCH_GEMMA3_270M=gemma-3-270m-q4_k_m.gguf pytest -m slow -rP tests/models/test_gemma3_270m.py
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers as hf
from uncached import decoder_of, logits_of

from specbatch import Engine, EngineConfig, SamplingParams, Speculation
from specbatch.jobs.questions import bundled_questions
from specbatch.weights import Checkpoint, open_checkpoint
from specbatch.weights.cache import file_hash

FILE = os.environ.get("SPECBATCH_GEMMA3_270M", "")
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not FILE, reason="SPECBATCH_GEMMA3_270M names no file"),
]
NEW_TOKENS = 32
DRAFTS = {
    "baseline": Speculation(),
    **{f"ngram {name}": Speculation("ngram", schedule=name, draft_tokens=4) for name in ("v1", "v2")},
}


class Theirs(NamedTuple):
    model: Any
    tokenizer: Any


@pytest.fixture(scope="module")
def path() -> Path:
    pytest.importorskip("accelerate")
    found = Path(FILE).resolve()
    assert file_hash(found) == SHA256
    return found


@pytest.fixture(scope="module")
def ours(path: Path) -> Checkpoint:
    return open_checkpoint(str(path))


@pytest.fixture(scope="module")
def theirs(path: Path) -> Theirs:
    where = {"gguf_file": path.name, "local_files_only": True}
    model = hf.AutoModelForCausalLM.from_pretrained(path.parent, **where, dtype=torch.float32).eval()
    return Theirs(model, hf.AutoTokenizer.from_pretrained(path.parent, **where))


def prompts() -> list[str]:
    """Questions of GSM8K, and one with so many examples that it is longer than the window of 512 tokens."""
    rows = [f"Question: {row['question']}\nAnswer: " for row in bundled_questions("gsm8k").rows[:5]]
    shots = [f"Question: {row['question']}\nAnswer: {row['answer']}" for row in bundled_questions("gsm8k_train").rows]
    return ["The capital of France is", *rows, "\n\n".join([*shots[:5], rows[0]])]


def texts(vocabulary: list[str]) -> list[str]:
    """Questions and answers of GSM8K, and random texts: of tokens, of any code points, of spaces and of ASCII.

    Without control tokens: transformers puts <bos> in front of a text that begins with it. Without 32 spaces or more
    in a row: transformers splits these into 16 and the rest, SentencePiece and this project into 31 and the rest.
    """
    rows = bundled_questions("gsm8k").rows
    pieces = [piece for piece in vocabulary[300:] if not piece.startswith("<")]
    points = [*range(0x20, 0xD800), *range(0xE000, 0x20000)]
    draw = random.Random(0)
    found = [row[key] for row in rows for key in ("question", "answer")]
    for _ in range(200):
        found += [
            "".join(draw.choices(pieces, k=draw.randint(1, 30))),
            "".join(map(chr, draw.choices(points, k=draw.randint(1, 30)))),
            "".join(draw.choices(" \t\n\r\u00a0\u3000abc.", k=draw.randint(1, 30))),
            "".join(map(chr, draw.choices(range(0x80), k=draw.randint(1, 60)))),
        ]
    return [text for text in found if " " * 32 not in text]


def test_tokens(ours: Checkpoint, theirs: Theirs) -> None:
    tokenizer = ours.tokenizer()
    every, count = texts(tokenizer.vocabulary()), 0
    for text in every:
        found = tokenizer.encode(text)
        assert found == theirs.tokenizer(text)["input_ids"], repr(text)
        assert tokenizer.decode(found) == theirs.tokenizer.decode(found, skip_special_tokens=True), repr(text)
        count += len(found)
    print(f"texts {len(every)}, tokens {count}: all equal")


def test_weights(ours: Checkpoint, theirs: Theirs) -> None:
    state = theirs.model.state_dict()
    assert {*ours.names()} == state.keys() - {"lm_head.weight"}
    for name in ours.names():
        assert torch.equal(ours.tensor(name), state[name]), name


def test_logits(ours: Checkpoint, theirs: Theirs) -> None:
    model = decoder_of(ours)
    for text in (prompts()[0], prompts()[1], prompts()[-1]):
        tokens = torch.tensor(ours.tokenizer().encode(text))
        count = len(tokens)
        with torch.no_grad():
            expected = theirs.model(tokens[None], use_cache=False).logits[0]
        found = logits_of(model, tokens)
        error = float((found - expected).abs().max())
        print(f"prompt of {count} tokens: logits to {float(expected.abs().max()):.1f}, largest difference {error:.1e}")
        assert error < 1e-3
        assert torch.equal(found.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("name", DRAFTS)
def test_answers(path: Path, theirs: Theirs, name: str) -> None:
    config = EngineConfig(
        model=str(path), device="cpu", dtype="float32", max_running=4, max_model_len=1024, speculation=DRAFTS[name]
    )
    with Engine(config) as engine:
        answers = engine.generate(prompts(), SamplingParams(max_new_tokens=NEW_TOKENS))
    theirs.model.generation_config.eos_token_id = sorted(engine.tokenizer.eos_ids)
    for answer in answers:
        ids = torch.tensor([answer.prompt_token_ids])
        with torch.no_grad():
            out = theirs.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False
            )
        assert out[0, ids.shape[1] :].tolist() == answer.token_ids
    lengths = [len(answer.prompt_token_ids) for answer in answers]
    assert max(lengths) > 512
    new, verifies = (
        sum(getattr(answer.metrics, key) for answer in answers) for key in ("output_tokens", "verify_steps")
    )
    print(
        f"{name}: prompts of {min(lengths)} to {max(lengths)} tokens; {new} tokens, all equal, in {verifies} verifies"
    )
