"""`generate` with a chat template that fails for some conversations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_folder
from typer.testing import CliRunner

from specbatch.cli.app import app

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
TEMPLATE = (
    "{% if messages[0].content == 'loop' %}" + LOOP + "{% elif messages[0].content == 'grow' %}{{ 'a' * 10000000000 }}"
    "{% elif messages[0].content == 'raise' %}{{ raise_exception('not this\none') }}{% endif %}"
    "{{ messages[0].content }}"
)


@pytest.fixture
def generate(tmp_path: Path, short_renderings: None) -> Any:
    folder = write_folder(tmp_path / "model")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    rows = [{"messages": [{"role": "user", "content": text}]} for text in ("a", "loop", "b", "grow", "raise", "c")]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(*options: str) -> Any:
        settings = ["--model", folder, "--device", "cpu", "--max-new-tokens", 2, "--kv-pages", 16, "--max-running", 2]
        arguments = ["generate", tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl", *settings, *options]
        return CliRunner().invoke(app, [str(item) for item in arguments])

    return run


def test_each_failing_conversation_is_a_malformed_line(generate: Any) -> None:
    result = generate()
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.stderr
    for line, reason in ((2, "more than 0.3 seconds"), (4, "more than 512 MiB"), (5, "not this one")):
        assert any(f"in.jsonl:{line}" in text and reason in text for text in result.stderr.splitlines()), result.stderr


def test_the_others_run_with_skip_bad(generate: Any, tmp_path: Path) -> None:
    result = generate("--skip-bad")
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["index"] for row in rows] == [0, 2, 5], result.stderr
