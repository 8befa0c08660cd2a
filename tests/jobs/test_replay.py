"""Recorded conversations are asked at each message of the assistant, and go on as they were recorded."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specbatch.core.completion import Completion, RequestMetrics
from specbatch.errors import SpecbatchError
from specbatch.jobs.replay import read_replay
from specbatch.sweeps.run.conversations import ask, longest
from specbatch.sweeps.workload.description import describe
from specbatch.sweeps.workload.workloads import Workload

CALL = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": '{"path": "a.py"}'}}
TOOL = {"type": "function", "function": {"name": "read", "parameters": {"type": "object", "properties": {}}}}
MESSAGES = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "file"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "three"},
    {"role": "assistant", "content": "last"},
]


def shown(messages: list[dict[str, Any]], tools: Any = (), **_: Any) -> str:
    """A chat template that shows roles, texts, arguments of calls and names of tools."""
    parts = [f"({tool['function']['name']})" for tool in tools]
    for message in messages:
        calls = "".join(str(call["function"]["arguments"]) for call in message.get("tool_calls", ()))
        parts.append(f"[{message['role']}]{message['content'] or ''}{calls}")
    return "".join(parts) + "[assistant]"


TOKENIZER: Any = SimpleNamespace(
    encode=lambda text, add_special_tokens=True: [*text.encode()],
    decode=lambda ids, skip_special_tokens=True: bytes(ids).decode(),
    apply_chat_template=shown,
    vocabulary=list,
)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def rows(*found: Any) -> Path:
        path = tmp_path / "replay.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in found))
        return path

    return rows


def test_every_engine_gets_the_recorded_history(write: Callable[..., Path]) -> None:
    path = write({"messages": MESSAGES, "tools": [TOOL], "id": 7}, {"messages": MESSAGES[1:3]})
    workload = Workload(str(path), replay=True, output_len=4)
    asked: list[str] = []

    def generate(prompts: list[list[int]], params: list[Any], **_: Any) -> list[Completion]:
        asked.extend(bytes(prompt).decode() for prompt in prompts)
        return [Completion(at, one, [*b"own"], "own", "stop", RequestMetrics()) for at, one in enumerate(prompts)]

    prompts = workload.prompts(TOKENIZER, 2)
    engine: Any = SimpleNamespace(generate=generate, tokenizer=TOKENIZER)
    calls = list(ask(engine, workload, prompts, workload.params(2), 2, lambda _: None))
    assert [(call.turn, call.places) for call in calls] == [(1, [0, 1]), (2, [0]), (3, [0])]
    first = "(read)[system]s[user]one"
    second = f"{first}[assistant]{{'path': 'a.py'}}[tool]file"
    third = f"{second}[assistant]two[user]three"
    assert asked == [f"{text}[assistant]" for text in (first, "[user]one", second, third)]
    assert list(longest(workload, TOKENIZER, prompts, workload.params(2))) == [len(asked[3]) + 4, len(asked[1]) + 4]
    described = describe(workload, prompts)
    assert (described["turns"], described["requests"], described["replay"]) == (3, 4, True)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": MESSAGES[:2]}, "needs a message of the assistant, and one before it"),
        ({"messages": MESSAGES[2:]}, "needs a message of the assistant, and one before it"),
        ({"messages": MESSAGES[:1]}, "needs a message of the assistant, and one before it"),
        ({"messages": []}, "needs a message of the assistant, and one before it"),
        ({"messages": [MESSAGES[1], {"role": "user", "content": None}]}, "content is null or missing"),
        ({"prompt": "text"}, 'has no messages to replay; rows with "prompt" or "turns" are asked without a replay'),
        ({"turns": ["a", "b"]}, "has no messages to replay"),
        ({"messages": [MESSAGES[1], {"role": "assistant", "content": "\ud800"}]}, "half of a surrogate pair"),
        ({"messages": MESSAGES, "tools": [{"type": "function"}]}, "tools.0.function is missing"),
    ],
)
def test_malformed_lines_are_refused(write: Callable[..., Path], row: Any, reason: str) -> None:
    path = write({"messages": MESSAGES}, row)
    with pytest.raises(SpecbatchError, match=r"replay\.jsonl:2'") as error:
        read_replay(path)
    assert reason in str(error.value)


def test_messages_are_read_as_apis_return_them(write: Callable[..., Path]) -> None:
    empty = {"refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": None}
    plain = [MESSAGES[1], *MESSAGES[-3:]]
    (found,) = read_replay(write({"messages": [plain[0], *({**one, **empty} for one in plain[1:])]}))
    assert found == read_replay(write({"messages": plain}))[0]


def test_rows_set_sampling_and_other_keys_are_noted(write: Callable[..., Path]) -> None:
    path = write({"messages": MESSAGES, "sampling": {"max_new_tokens": 3}, "metadata": {"run": 1}})
    workload = Workload(str(path), replay=True, output_len=4)
    assert [one.max_new_tokens for one in workload.params(1)] == [3]
    assert workload.notes() == [f"note: {path}:1: keys that are not read: metadata"]
    with pytest.raises(SpecbatchError, match=r"replay\.jsonl:1': sampling has no parameter \"max_tokens\""):
        read_replay(write({"messages": MESSAGES, "sampling": {"max_tokens": 3}}))


def test_columns_of_a_table_are_read(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    messages = [MESSAGES[1], *MESSAGES[-3:]]
    row = {"messages": messages, "category": "a", "sampling": {"max_new_tokens": 3}, "note": "x"}
    pandas.DataFrame([row]).to_parquet(tmp_path / "replay.parquet")
    (found,) = read_replay(tmp_path / "replay.parquet")
    assert (found.category, found.sampling, found.unread) == ("a", {"max_new_tokens": 3}, ("note",))


def test_only_a_file_is_replayed() -> None:
    with pytest.raises(SpecbatchError, match=r"asks the conversations of a file; use dataset='FILE\.jsonl'"):
        Workload("gsm8k", replay=True)


@pytest.mark.parametrize("words", [[], ["--text"]])
def test_script_writes_conversations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    for name, count in (("first", 4), ("second", 1)):
        (tmp_path / "packages" / name).mkdir(parents=True)
        for number in range(count):
            (tmp_path / "packages" / name / f"f{number}.py").write_text(f"value = {number}\n" * 60)
    (tmp_path / "packages/first/e.py").symlink_to("missing.py")
    out = tmp_path / "new/made.jsonl"
    script = Path(__file__).parents[2] / "docs/grids/agent_replay.py"
    monkeypatch.setattr(
        sys, "argv", [str(script), str(tmp_path / "packages"), "--turns", "4", "--out", str(out), *words]
    )
    runpy.run_path(str(script), run_name="__main__")
    (row,) = read_replay(out)
    assert (row.id, len(row.later), len(row.tools)) == ("first", 3, 0 if words else 2)
    texts = [message["content"] for step in row.later for message in step]
    assert sum("value = " in text for text in texts) == 2


@pytest.mark.parametrize(("name", "turns"), [("packages", "2"), ("packages", "9"), ("missing", "3")])
def test_script_refuses_what_makes_no_conversation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, turns: str
) -> None:
    (tmp_path / "packages/first").mkdir(parents=True)
    (tmp_path / "packages/first/f.py").write_text("value = 1\n" * 60)
    out, script = tmp_path / "made.jsonl", Path(__file__).parents[2] / "docs/grids/agent_replay.py"
    monkeypatch.setattr(sys, "argv", [str(script), str(tmp_path / name), "--turns", turns, "--out", str(out)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 2
    assert not out.exists()
    assert ("no such folder" if name == "missing" else "--turns") in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", [str(script), str(tmp_path / "packages"), "--conversations", "0"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(script), run_name="__main__")
    assert "--conversations=0: must be at least 1" in capsys.readouterr().err
