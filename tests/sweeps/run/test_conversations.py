"""Later turns of a conversation follow the answers of the configuration itself."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specbatch.core.completion import Completion, RequestMetrics
from specbatch.sweeps.run.conversations import ask, label, longest
from specbatch.sweeps.workload.workloads import Workload

END = 256


def _decode(ids: list[int], *, skip_special_tokens: bool = True) -> str:
    text = bytes(token for token in ids if token != END).decode()
    return text + ("" if skip_special_tokens or END not in ids else "<end>")


def _encode(text: str, *, add_special_tokens: bool = True) -> list[int]:
    return [*text.replace("<end>", "").encode(), *([END] if "<end>" in text else [])]


def _template(messages: list[dict[str, str]], **_: Any) -> str:
    return "".join(f"[{message['role']}]{message['content']}" for message in messages) + "[assistant]"


TOKENIZER = SimpleNamespace(encode=_encode, decode=_decode, apply_chat_template=_template, vocabulary=list)


class Engine:
    """Answers with the number of the request, after reasoning. fails: prompts with this text."""

    tokenizer = TOKENIZER

    def __init__(self, *, gives_ids: bool = True, fails: str = "nothing fails") -> None:
        self.gives_ids, self.fails = gives_ids, fails
        self.asked: list[str] = []
        self.seeds: list[int | None] = []

    def generate(self, prompts: list[list[int]], params: list[Any], **_: Any) -> list[Completion]:
        done = []
        for index, prompt in enumerate(prompts):
            self.asked.append(_decode(prompt))
            text = f"<think>hm</think>\n\nanswer {len(self.asked)}<end>"
            reason = "error" if self.fails in self.asked[-1] else "stop"
            ids = _encode(text) if self.gives_ids else []
            done.append(Completion(index, prompt, ids, text, reason, RequestMetrics()))
        self.seeds += [one.seed for one in params]
        return done


@pytest.fixture
def conversations(tmp_path: Path) -> Any:
    rows = [
        {"turns": ["one", "two", "three"], "category": "a"},
        {"prompt": "alone"},
        {"messages": [{"role": "user", "content": text} for text in ("eins", "zwei")], "category": "b"},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return lambda **changes: Workload(str(path), output_len=5, **changes)


def run(workload: Workload, engine: Engine, count: int = 3) -> list[Any]:
    prompts = workload.prompts(TOKENIZER, count)  # type: ignore[arg-type]
    return list(ask(engine, workload, prompts, workload.params(count), 2, lambda _: None))  # type: ignore[arg-type]


FIRST = ["[user]one[assistant]", "alone", "[user]eins[assistant]"]  # in turn from each category
SECOND = ["[user]one[assistant]answer {}[user]two[assistant]", "[user]eins[assistant]answer {}[user]zwei[assistant]"]


@pytest.mark.parametrize("gives_ids", [True, False])  # a server gives text alone
def test_prompts_of_a_turn_hold_the_own_answers_without_reasoning(conversations: Any, gives_ids: bool) -> None:
    engine = Engine(gives_ids=gives_ids)
    calls = run(conversations(), engine)
    assert [(call.turn, call.places) for call in calls] == [(1, [0, 1, 2]), (2, [0, 2]), (3, [0])]
    second = [SECOND[0].format(1), SECOND[1].format(3)]
    third = f"{second[0]}answer 4[user]three[assistant]"
    assert engine.asked == [*FIRST, *second, third]
    rows = [{"index": index} for index in (1, 0, 2, 1, 0, 0)]  # in the order in which they ended
    label(conversations(), calls, rows, 3)
    assert [(row["index"], row["turn"], row["category"]) for row in rows] == [
        (1, 1, ""), (0, 1, "a"), (2, 1, "b"), (5, 2, "b"), (3, 2, "a"), (6, 3, "a")
    ]  # fmt: skip


def test_number_of_turns_and_requests_one_after_the_other(conversations: Any) -> None:
    engine = Engine()
    run(conversations(turns=2), engine)
    assert len(engine.asked) == 5
    calls = run(conversations(turns=2, sequential=True), Engine())
    assert [(call.turn, call.places) for call in calls] == [(1, [0]), (1, [1]), (1, [2]), (2, [0]), (2, [2])]
    engine = Engine()
    run(conversations(turns=1), engine)
    assert engine.asked == FIRST


def test_conversation_ends_with_a_request_that_failed(conversations: Any) -> None:
    engine = Engine(fails="[user]one")
    assert [call.places for call in run(conversations(), engine)] == [[0, 1, 2], [2]]


def test_each_turn_has_its_own_seed(conversations: Any) -> None:
    engines = Engine(), Engine()
    for engine in engines:
        run(conversations(temperature=0.6), engine)
    assert engines[0].seeds == engines[1].seeds
    assert len({*engines[0].seeds}) == 6


def test_longest_bounds_what_a_conversation_needs(conversations: Any) -> None:
    workload, engine = conversations(), Engine()
    run(workload, engine)
    bounds = list(longest(workload, TOKENIZER, [_encode(text) for text in FIRST], workload.params(3)))  # type: ignore[arg-type]
    assert bounds[1] == len("alone") + 5
    extra = 2 * (len("answer 1") - 5)  # the fake answers are longer than allowed
    assert bounds[0] + extra >= len(engine.asked[-1]) + 5
