"""Files of a corpus, edited by hand: their answers are read, or a line is refused with its number."""

from __future__ import annotations

import json
from pathlib import Path

from fuzzing import Fuzz
from mutate import mutate_json_text

from specbatch.config.speculation import Speculation
from specbatch.drafters.corpus_files import plan_corpus
from specbatch.errors import SpecbatchError
from specbatch.weights import open_checkpoint

ROWS = [
    {"index": 0, "text": "two", "token_ids": [116, 119, 111, 256], "finish_reason": "stop", "error": None},
    {"custom_id": "a", "error": None, "response": {"body": {"choices": [{"message": {"content": "two"}}]}}},
    {"doc_id": 0, "question": "1 + 1 =", "text": "two", "token_ids": [116, 119, 111]},
]


def test_corpus_file(fuzz: Fuzz, tmp_path: Path) -> None:
    target, path = open_checkpoint("qwen3-0.6b", "dummy"), tmp_path / "out.jsonl"
    whole = [json.dumps(row).encode() for row in ROWS]
    for random in fuzz.rounds(quick=150):
        lines = [mutate_json_text(random, line) if random.random() < 0.5 else line for line in whole]
        path.write_bytes(b"\n".join(lines))
        try:
            plan = plan_corpus(Speculation("ngram", corpus=str(path)), target, lambda line: None)
        except SpecbatchError as error:
            fuzz.refused(error)
            continue
        fuzz.outcome("accepted")
        assert plan is not None
        for tokens, prompt in plan.given:
            assert 0 <= prompt < len(tokens)
            assert all(type(token) is int and 0 <= token < target.config.vocab_size for token in tokens)
