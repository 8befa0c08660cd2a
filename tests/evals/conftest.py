"""A fake engine with canned answers, a byte tokenizer and plausible metrics."""

from __future__ import annotations

import json
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import pytest
import tokenizers
import torch
import transformers as hf
from checkpoints import tokenizer as bytes_and_merges

from specbatch.config.engine_config import EngineConfig, Graphs
from specbatch.core.completion import Completion, RequestMetrics
from specbatch.core.output_text import OutputText
from specbatch.core.sampling_params import SamplingParams
from specbatch.engine.scoring import Likelihood, OnScore
from specbatch.evals.grid import Evaluation
from specbatch.evals.report import EvalReport
from specbatch.evals.run import EvalOptions, run_eval
from specbatch.records.run_record import RunRecord
from specbatch.records.summarize import summarize
from specbatch.sweeps.run.benchmark import Benchmark

SPECIAL = {"<s>": 256, "<|im_start|>": 257, "<|im_end|>": 258}
_MARKS = f"({'|'.join(map(re.escape, SPECIAL))})"
Reply = Callable[[str], str]


@pytest.fixture(scope="session", autouse=True)
def _read_once(_tasks_are_read_once: None) -> None: ...


@pytest.fixture(autouse=True)
def _rows_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval lists all rows of examples for each task, which takes a tenth of the time where they are converted
    together."""
    monkeypatch.setattr(datasets.Dataset, "__iter__", lambda self: iter(self.to_list()))


class FakeTokenizer:
    name = "bytes"
    vocab_size = 259
    eos_ids = frozenset({258})
    bos_id: int | None = 256
    eos_id: int | None = 258
    has_chat_template = True
    chat_template = None
    special_tokens: dict[str, str] = {}  # noqa: RUF012
    chat_begin = "<s>"
    hidden = SPECIAL

    def encode(self, text: str, *, add_special_tokens: bool = True, as_transformers: bool = False) -> list[int]:
        tokens = [self.bos_id] if add_special_tokens else []
        for part in re.split(_MARKS, text):
            tokens += [SPECIAL[part]] if part in SPECIAL else part.encode()
        return tokens

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        if not skip_special_tokens:
            return "".join(name for token in ids for name, number in SPECIAL.items() if number == token)
        return bytes(token for token in ids if token < 256).decode(errors="replace")

    def apply_chat_template(self, messages: list[dict[str, str]], *, continue_final_message: bool = False) -> str:
        turns = [f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in messages]
        text = self.chat_begin + "".join(turns)
        return text.removesuffix("<|im_end|>\n") if continue_final_message else text + "<|im_start|>assistant\n"

    def vocabulary(self) -> list[str]:
        return [f"byte{value}" for value in range(256)] + list(SPECIAL)

    def token_bytes(self) -> list[bytes | None]:
        raise AssertionError("no prompt has a grammar")


class FakeEngine:
    """Answers each prompt with `reply(text of the prompt)`, one byte per token, and stops like a real engine. In
    `score`, a byte of a continuation has log probability -1/8 if it equals the reply's and -4 if not.

    The last prompt finishes first; `stop_after` raises KeyboardInterrupt after that many.
    """

    def __init__(self, reply: Reply, *, max_model_len: int = 100_000) -> None:
        self.config = EngineConfig(graphs=Graphs())  # an engine on a CPU resolves those of "auto"
        self.tokenizer = FakeTokenizer()
        self.caps: dict[str, Any] = {"max_model_len": max_model_len, "dtype": "float32", "device": "cpu"}
        self.reply = reply
        self.stop_after: int | None = None
        self.calls: list[dict[str, Any]] = []
        self.done: list[Completion] = []
        self.pairs: list[tuple[list[int], list[int]]] = []

    def score(
        self, pairs: Sequence[tuple[list[int], list[int]]], *, on_score: OnScore | None = None
    ) -> list[Likelihood]:
        self.pairs = list(pairs)
        made = {}
        for place in reversed(range(len(pairs))):
            if self.stop_after is not None and len(made) == self.stop_after:
                raise KeyboardInterrupt
            context, continuation = pairs[place]
            liked = self.tokenizer.encode(self.reply(self.tokenizer.decode(context)), add_special_tokens=False)
            same = sum(one == other for one, other in zip(continuation, liked, strict=False))
            made[place] = Likelihood(3.875 * same - 4 * len(continuation), same == len(continuation))
            if on_score is not None:
                on_score(place, made[place])
        return [made[place] for place in range(len(pairs))]

    def generate(
        self,
        prompts: Sequence[str | list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        concurrency: int | None = None,
        arrivals: Sequence[float] | None = None,
        on_completion: Callable[[Completion], None] | None = None,
    ) -> list[Completion]:
        assert isinstance(params, Sequence)
        self.calls.append({"prompts": list(prompts), "params": list(params), "concurrency": concurrency})
        made = {}
        for place in reversed(range(len(prompts))):
            if self.stop_after is not None and len(made) == self.stop_after:
                raise KeyboardInterrupt
            prompt = prompts[place]
            assert isinstance(prompt, list)
            made[place] = self.answer(place, prompt, params[place])
            if on_completion is not None:
                on_completion(made[place])
        self.done = [made[place] for place in range(len(prompts))]
        return self.done

    def answer(self, place: int, prompt: list[int], params: SamplingParams) -> Completion:
        text, reason = self.reply(self.tokenizer.decode(prompt)), "stop"
        output = OutputText(lambda ids: bytes(ids).decode(errors="replace"), params.stop, params.reasoning)
        any(output.push(byte) for byte in text.encode())
        text = output.whole()
        if len(text.encode()) > params.max_new_tokens:
            text, reason = text.encode()[: params.max_new_tokens].decode(errors="ignore"), "length"
        tokens = list(text.encode())
        metrics = RequestMetrics(
            prompt_tokens=len(prompt), output_tokens=len(tokens), ttft_s=0.5 + place, tpot_s=0.01, e2e_s=1.0 + place,
            verify_steps=2, emitted=5, drafted=8, accepted=3, accept_length=2.5,
        )  # fmt: skip
        return Completion(place, prompt, tokens, text, reason, metrics)

    def reset_record(self) -> None:
        self.done, self.pairs = [], []

    def record(self, *, concurrency: int | None = None, workload: dict[str, Any] | None = None) -> RunRecord:
        metrics = summarize(self.done, 2.0, concurrency)
        if self.pairs:
            tokens = sum(len(continuation) for _, continuation in self.pairs)
            metrics = {"requests": len(self.pairs), "scored_tokens": tokens, "input_throughput": 10.0}
        rows = [item.as_row() for item in self.done]
        return RunRecord(self.config.as_dict() | {"model": "fake"}, self.caps, metrics, {}, rows, workload or {})


def sums(first: int, count: int) -> list[dict[str, str]]:
    """GSM8K-like rows about `first`, `first + 1`, ...; each question ends in the number it asks for."""
    numbers = range(first, first + count)
    return [{"question": f"What comes before {n + 1}? #{n}", "answer": f"One less.\n#### {n}"} for n in numbers]


class EngineOfPoints(FakeEngine):
    """One of `EnginesOfPoints`. Warm-ups and measurements alternate.

    forgotten   how many calls there were each time that prefixes were forgotten
    """

    def __init__(self, engines: EnginesOfPoints, name: str, config: EngineConfig) -> None:
        super().__init__(self._reply)
        self.engines, self.name, self.config = engines, name, config
        self.forgotten: list[int] = []

    def _reply(self, text: str) -> str:
        if self.name in self.engines.broken:
            raise self.engines.error
        other = self.name == "v2" and "#100\n" in text.rsplit("Question", 1)[-1]
        return ("? " if other else "") + self.engines.reply(text)

    def generate(self, *prompts: Any, **how: Any) -> list[Completion]:
        measures = len(self.calls) % 2 == 1
        self.stop_after = self.engines.stop_after.get(self.name) if measures else None
        return super().generate(*prompts, **how)

    def record(self, **known: Any) -> RunRecord:
        found = super().record(**known)
        if self.name in self.engines.lost:
            found.counters["replaced_replicas"] = 1
        return found

    def forget_prefixes(self) -> None:
        self.forgotten.append(len(self.calls))


class EnginesOfPoints:
    """Engines of a sweep or an evaluation, which give the same answers, except for v2's first question.

    broken      configurations whose requests raise `error`; unbuilt: those that cannot be loaded
    lost        configurations that lose a replica
    stop_after  by configuration: completions of a measurement, before it is interrupted
    made        the engines that were loaded last, of `loads` times
    """

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self.broken: tuple[str, ...] = ()
        self.unbuilt: tuple[str, ...] = ()
        self.lost: tuple[str, ...] = ()
        self.error: Exception = MemoryError("no room")
        self.stop_after: dict[str, int] = {}
        self.made: dict[str, EngineOfPoints] = {}
        self.loads = 0

    @contextmanager
    def load(self, group: Mapping[str, EngineConfig]) -> Iterator[dict[str, EngineOfPoints]]:
        self.loads += 1
        if {*group} & {*self.unbuilt}:
            raise self.error
        self.made = {name: EngineOfPoints(self, name, config) for name, config in group.items()}
        yield self.made


@pytest.fixture
def byte_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that are not loaded have the tokenizer of bytes."""
    space = types.SimpleNamespace
    target = space(tokenizer=FakeTokenizer, config=space(vocab_size=FakeTokenizer.vocab_size, hidden_size=1))
    draft = space(kv_slots_per_step=lambda drafts: drafts + 1)

    def unloaded(config: EngineConfig) -> Any:
        return space(config=config, target=target, draft=draft, max_position=100_000)

    monkeypatch.setattr("specbatch.sweeps.run.unloaded.check_machine", unloaded)


@pytest.fixture
def engines(mixed_reply: Reply, byte_checkpoint: None, monkeypatch: pytest.MonkeyPatch) -> EnginesOfPoints:
    """In place of those that sweeps and evaluations load."""
    found = EnginesOfPoints(mixed_reply)
    for kind in (Evaluation, Benchmark):
        monkeypatch.setattr(kind, "load", lambda workload, group, log, failed: found.load(group))
    return found


@pytest.fixture(scope="session")
def make_engine() -> type[FakeEngine]:
    return FakeEngine


@pytest.fixture
def make_rows() -> Callable[[int, int], list[dict[str, str]]]:
    return sums


def write_jsonl(path: Path, rows: Sequence[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[[str, Sequence[object]], Path]:
    return lambda name, rows: write_jsonl(tmp_path / name, rows)


@pytest.fixture(scope="session")
def mixed_reply() -> Reply:
    """By number modulo 4: 0 right in GSM8K's form, 1 right as last number only, 2 no number, 3 wrong and long."""

    def reply(prompt: str) -> str:
        number = int(prompt.rsplit("#", 1)[1].split("\n")[0])  # which the last question asks for
        kinds = (f" ok\n#### {number}\n\nQuestion: more", f" it is {number}.", " dunno", " 7 " + "x" * 600)
        return kinds[number % 4]

    return reply


@pytest.fixture(scope="session")
def scored_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("scored") / "scored.jsonl", sums(100, 8))


@pytest.fixture(scope="session")
def shots_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("shots") / "shots.jsonl", sums(500, 12))


@pytest.fixture(scope="session")
def evaluate(mixed_reply: Reply, scored_file: Path) -> Callable[..., EvalReport]:
    """`evaluate(task, reply=..., engine=..., **options)`: the report of a task, by default gsm8k over `scored_file`."""

    def run(
        task: str = "gsm8k",
        reply: Reply = mixed_reply,
        engine: FakeEngine | None = None,
        progress: Callable[[int, int], None] | None = None,
        **options: Any,
    ) -> EvalReport:
        if task.startswith("gsm8k"):
            options = {"data": scored_file} | options
        return run_eval(engine or FakeEngine(reply), EvalOptions(task, **options), progress)

    return run


@pytest.fixture(scope="session")
def report_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `report` is saved."""
    return tmp_path_factory.mktemp("report") / "deep" / "out"


@pytest.fixture(scope="session")
def report(evaluate: Callable[..., EvalReport], report_folder: Path) -> EvalReport:
    """The report of `evaluate()`; not to be changed."""
    return evaluate(output=report_folder)


@pytest.fixture
def no_env_info(monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval's own evaluations leave out the description of the machine, which is slow and not compared."""
    import lm_eval.evaluator

    monkeypatch.setattr(lm_eval.evaluator, "add_env_info", lambda results: None)


@pytest.fixture
def hflm() -> Any:
    """lm-eval's model for transformers."""
    from lm_eval.models.huggingface import HFLM

    return HFLM


TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' and messages | length > 2 %}{{ raise_exception('no') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """A folder with a random model, and transformers' model and tokenizer, which adds a bos token. The template does
    not begin with it."""
    folder, backend = tmp_path_factory.mktemp("tiny"), bytes_and_merges()
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="<|im_end|>")
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(1)
    config = hf.LlamaConfig(
        vocab_size=264, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=256, eos_token_id=257, initializer_range=0.4,
    )  # fmt: skip
    model = hf.LlamaForCausalLM(config).eval().float()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder, model, tokenizer


@pytest.fixture
def no_scan(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """lm-eval may not look through all of its files, which takes half a minute. Returns what it does look through."""
    import lm_eval.tasks

    manager, found = lm_eval.tasks.TaskManager, list[Any]()

    def of_few_files(include_path: Any = None, include_defaults: bool = True) -> Any:
        assert not include_defaults, "reads all definitions"
        found.append(include_path)
        return manager(include_path=include_path, include_defaults=False)

    monkeypatch.setattr(lm_eval.tasks, "TaskManager", of_few_files)
    return found


@pytest.fixture
def tasks_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of tasks in place of lm-eval's 14,000."""
    import lm_eval.tasks

    from specbatch.evals import task, user_tasks

    folder, manager = tmp_path / "lm_eval_tasks", lm_eval.tasks.TaskManager
    folder.mkdir()

    def either(include_path: Any = (), include_defaults: bool = True) -> Any:
        given = [include_path] if isinstance(include_path, Path) else include_path
        return manager(include_path=[*([folder] if include_defaults else []), *given], include_defaults=False)

    monkeypatch.setattr(lm_eval.tasks, "TaskManager", either)
    found = task.names_in
    monkeypatch.setattr(task, "names_in", lambda _, wanted=(): found(folder, wanted))
    trusted = user_tasks.is_trusted
    monkeypatch.setattr(user_tasks, "is_trusted", lambda path: path.is_relative_to(folder) or trusted(path))
    return folder


@pytest.fixture
def policy(tmp_path: Path) -> Any:
    def write(text: str) -> Path:
        (tmp_path / "policy.toml").write_text(text)
        return tmp_path / "policy.toml"

    return write
