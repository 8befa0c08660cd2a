"""ShareGPT conversations: which rows are asked, how long their answers are, and files of another form."""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specbatch.errors import SpecbatchError
from specbatch.files.text_files import LARGEST
from specbatch.sweeps.workload.description import describe
from specbatch.sweeps.workload.heading import lines_of
from specbatch.sweeps.workload.sharegpt import SHAREGPT
from specbatch.sweeps.workload.workloads import Workload

OWN = Path(__file__).parents[3] / "docs/grids/sharegpt-form.json"
LETTERS: Any = SimpleNamespace(encode=lambda text, add_special_tokens=True: list(text.encode()))


def talk(*values: str) -> dict[str, Any]:
    return {"conversations": [{"from": "human" if n % 2 == 0 else "gpt", "value": v} for n, v in enumerate(values)]}


def workload(tmp_path: Path, *entries: Any, **settings: Any) -> Workload:
    path = tmp_path / "talks.json"
    path.write_text(json.dumps(list(entries)))
    return Workload(dataset=SHAREGPT, data=path, **settings)


def asked(work: Workload, count: int = 9, longest: int = 99) -> list[tuple[str, int]]:
    fitted = work.for_engines(LETTERS, count, longest)
    prompts = fitted.prompts(LETTERS, len(fitted.rows))
    assert all(params.ignore_eos for params in fitted.params(len(prompts)))
    lengths = [params.max_new_tokens for params in fitted.params(len(prompts))]
    return [(bytes(prompt).decode(), length) for prompt, length in zip(prompts, lengths, strict=True)]


def test_rows_have_the_lengths_of_their_answers(tmp_path: Path) -> None:
    entries = [
        talk("ask", "answer", "more", "left out"),
        talk("alone"),
        talk("ok", "x"),  # one token
        talk("y", "fine"),
        talk("much too long", "x" * 90),
        {"id": "none"},
        {"conversation": talk("also", "read")["conversations"]},
    ]
    assert sorted(asked(workload(tmp_path, *entries))) == [("also", 4), ("ask", 6)]


def test_the_order_is_that_of_bench_serving(tmp_path: Path) -> None:
    entries = [talk(f"ask {number}", "answer") for number in range(9)]
    order = [f"ask {number}" for number in range(9)]
    random.Random(7).shuffle(order)
    assert [text for text, _ in asked(workload(tmp_path, *entries, seed=7), 4)] == order[:4]


def test_prompts_can_be_messages(tmp_path: Path) -> None:
    work = workload(tmp_path, talk("ask", "answer"), chat_template=True)
    rendering: Any = SimpleNamespace(
        encode=LETTERS.encode, apply_chat_template=lambda messages, **_: f"<{messages[0]['content']}>"
    )
    (row,) = work.for_engines(rendering, 1, 99).rows
    assert (row.value, row.sampling["max_new_tokens"]) == ([{"role": "user", "content": "ask"}], 6)


def test_description(tmp_path: Path) -> None:
    work = workload(tmp_path, talk("ask", "answer"), talk("and", "be answered"))
    assert "exactly as long as the answers of its rows" in lines_of(describe(work, []))["workload"]
    fitted = work.for_engines(LETTERS, 2, 99)
    described = describe(fitted, fitted.prompts(LETTERS, 2))
    assert (described["output_range"], described["output_len"], described["ignore_eos"]) == ([6, 11], 11, True)


def test_own_file_has_the_form() -> None:
    rows = Workload(dataset=SHAREGPT, data=OWN).for_engines(LETTERS, 99, 999).rows
    assert len(rows) == 10


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "must be a JSON list; write [{"),
        ("[3]", "entry 1': must be a JSON object"),
        ('[{"conversations": "no"}]', "entry 1.conversations': must be a list of messages"),
        ('[{"conversations": [{"from": "human", "text": "a"}, {}]}]', "entry 1.conversations[0]': has no text under"),
        ('[{"prompt": "a"}]', "has no conversation of two messages"),
        ('{"a": 1}\n{"b": 2}', "talks.json"),
    ],
)
def test_files_of_another_form_are_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "talks.json"
    path.write_text(content)
    with pytest.raises(SpecbatchError, match=re.escape(message)):
        Workload(dataset=SHAREGPT, data=path)


def test_other_rates_do_not_read_the_file_again(tmp_path: Path) -> None:
    work = workload(tmp_path, talk("ask", "answer"))
    (tmp_path / "talks.json").unlink()
    for rate in (1.0, 5.0):
        other = work.varied(request_rate=rate)
        assert (other.request_rate, other.rows, other.rows_sha256) == (rate, work.rows, work.rows_sha256)
    with pytest.raises(SpecbatchError, match="request_rate=-1"):
        work.varied(request_rate=-1)
    with pytest.raises(SpecbatchError, match="thinking=True: no prompt is rendered"):
        work.varied(thinking=True)
    assert (work.request_rate, work.thinking) == (math.inf, None)


def test_the_file_may_be_larger_than_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that benchmarks use has hundreds of MiB."""
    monkeypatch.setitem(LARGEST, "JSON", 20)
    assert workload(tmp_path, talk("ask", "answer")).rows


def test_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecbatchError, match="data=None: sharegpt is not bundled; name ShareGPT_V3"):
        Workload(dataset=SHAREGPT)
    with pytest.raises(SpecbatchError, match="of 2 tokens or more each, that fit into a context of 3 tokens together"):
        workload(tmp_path, talk("ask", "answer")).for_engines(LETTERS, 1, 3)
