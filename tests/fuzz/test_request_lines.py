"""Mutated lines of prompt files: each is a prompt or a malformed line with a reason."""

from __future__ import annotations

from pathlib import Path

from fuzzing import Fuzz
from mutate import mutate_json_text

from specbatch.errors import SpecbatchError
from specbatch.jobs.prompts import MalformedLine, scan_prompts

LINES = [
    '{"prompt": "The capital of France is", "id": 1}',
    '{"messages": [{"role": "user", "content": "Name a river."}]}',
    '{"prompt_token_ids": [3, 4, 5], "id": "x"}',
    '{"question": "How many?"}',
]


def test_prompt_lines(fuzz: Fuzz, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    for random in fuzz.rounds(quick=300):
        path.write_bytes(b"\n".join(mutate_json_text(random, line.encode()) for line in LINES))
        try:
            found = scan_prompts(path)
        except SpecbatchError as error:
            fuzz.refused(error)
            continue
        for item in found:
            if isinstance(item, MalformedLine):
                assert item.problem
                fuzz.outcome("malformed lines")
            else:
                fuzz.outcome("prompts")
