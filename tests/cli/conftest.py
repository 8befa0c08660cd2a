"""A stub engine that answers at once, to test the commands without a model, and a tiny model behind a server."""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import count, islice, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from typer.testing import CliRunner, Result

from specbatch.config.engine_config import EngineConfig
from specbatch.core.completion import Completion, RequestMetrics
from specbatch.core.sampling_params import SamplingParams
from specbatch.engine.requests.open_requests import StreamEvent
from specbatch.errors import refuse
from specbatch.memory.planner import EXCLUSIVE, MemoryShare
from specbatch.records.run_record import RunRecord
from specbatch.records.summarize import summarize
from specbatch.sweeps.run import estimate

if TYPE_CHECKING:
    from engine_server import EngineServer

    from specbatch.engine.engine import Engine

TINY_SWEEP = ("--input-len", 6, "--output-len", 5, "--prompts-per-concurrency", 2)
SMALL_SWEEP = ("--device", "cpu", "--input-len", 6, "--output-len", 5, "--prompts-per-concurrency", 12)


@pytest.fixture(scope="session", autouse=True)
def _read_once(_tasks_are_read_once: None) -> None: ...


@pytest.fixture(scope="session", autouse=True)
def _cpu_is_measured_once() -> Iterator[None]:
    """Dry runs measure it, which takes most of their time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(estimate, "cpu_speeds", cache(estimate.cpu_speeds))
        yield


class StubTokenizer:
    """One token per byte; 256 ends."""

    name, vocab_size, eos_ids, bos_id = "bytes", 257, frozenset({256}), None
    has_chat_template = True
    chat_template = tool_template = None
    special_tokens: dict[str, str] = {}  # noqa: RUF012
    hidden: dict[str, int] = {}  # noqa: RUF012

    def token_bytes(self) -> list[bytes]:
        return []

    def vocabulary(self) -> list[str]:
        return [*map(chr, range(256)), "<eos>"]

    def template_writes(self, text: str) -> bool:
        return False

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(token for token in ids if token < 256).decode(errors="replace")

    def render_ahead(self, conversations: Iterable[Any]) -> None: ...

    def apply_chat_template(self, messages: list[dict[str, str]], *, add_generation_prompt: bool = True) -> str:
        return "".join(f"<{message['role']}>{message['content']}" for message in messages) + "<assistant>"


class _Vocabulary:
    vocab_size, hidden_size = StubTokenizer.vocab_size, 1


class StubEngine:
    """Echoes the last token of the prompt plus 1, 2, 3 ...; two tokens per verify when it speculates.

    Each test has a subclass of its own: what it sets there or finds there ends with the test. A test may set the
    functions that are called when an engine is prepared, built, entered, given prompts, about to answer or left, and
    fail in them."""

    built: ClassVar[list[EngineConfig]]
    lenders: ClassVar[list[StubEngine | None]]  # whose weights each of them uses
    shares: ClassVar[list[MemoryShare]]
    order: ClassVar[list[str]]  # schedule of each measured generate
    arrived: ClassVar[list[list[float] | None]]  # when its prompts did
    forgot: ClassVar[int] = 0  # how often a prefix cache was emptied
    interrupt_after: ClassVar[int | None] = None  # completions, over all engines
    kv_pages: ClassVar[int] = 1000
    tokenizer_class: ClassVar[type[StubTokenizer]] = StubTokenizer

    preparing: ClassVar[Callable[[EngineConfig], object]] = lambda config: None
    building: ClassVar[Callable[[EngineConfig], object]] = lambda config: None
    entering: ClassVar[Callable[[], object]] = lambda: None
    leaving: ClassVar[Callable[[], object]] = lambda: None
    streaming: ClassVar[Callable[[EngineConfig, int | None], object]] = lambda config, concurrency: None
    answering: ClassVar[Callable[[Any, SamplingParams], Any]] = lambda prompt, params: prompt  # what is answered

    def __init_subclass__(cls) -> None:
        cls.built, cls.lenders, cls.shares, cls.order, cls.arrived = [], [], [], [], []

    def __init__(
        self,
        config: EngineConfig,
        *,
        log: Callable[[str], None] | None = None,
        report: Callable[[int, int], None] | None = None,
        weights_of: StubEngine | None = None,
        share: MemoryShare = EXCLUSIVE,
    ) -> None:
        type(self).building(config)
        self.built.append(config)
        self.lenders.append(weights_of)
        self.shares.append(share)
        self.config, self.tokenizer = config, self.tokenizer_class()
        self.caps: dict[str, Any] = {
            "max_running": 32 if config.max_running == "auto" else config.max_running,
            "max_model_len": config.max_model_len or 256,
            "kv_pages": self.kv_pages, "page_size": 16, "verify_rows": config.speculation.num_drafts + 1,
            "verify_slots": config.speculation.num_drafts + 1,
            "prefill_chunk": 64, "dtype": "float32", "device": "cpu",
        }  # fmt: skip
        self.done: list[Completion] = []
        if log is not None:
            log("memory plan: nothing")

    @classmethod
    def unloaded(cls, config: EngineConfig) -> Any:
        """What is known of an engine that is not built."""
        cls.preparing(config)
        target = types.SimpleNamespace(tokenizer=cls.tokenizer_class, config=_Vocabulary)
        draft = types.SimpleNamespace(kv_slots_per_step=lambda drafts: drafts + 1)
        return types.SimpleNamespace(config=config, target=target, draft=draft, max_position=1 << 20)

    def __enter__(self) -> StubEngine:
        type(self).entering()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
        type(self).leaving()

    def close(self) -> None: ...

    def generate(
        self,
        prompts: list[Any],
        params: Any = None,
        *,
        concurrency: int | None = None,
        arrivals: list[float] | None = None,
        on_completion: Callable[[Completion], None] | None = None,
    ) -> list[Completion]:
        out: dict[int, Completion] = {}
        for event in self.stream(prompts, params, concurrency=concurrency, arrivals=arrivals):
            if event.completion is not None:
                out[event.index] = event.completion
                if on_completion is not None:
                    on_completion(event.completion)
        return [out[index] for index in range(len(prompts))]

    def stream(
        self,
        prompts: Iterable[Any],
        params: Any = None,
        *,
        concurrency: int | None = None,
        arrivals: list[float] | None = None,
        text: bool = True,
    ) -> Iterator[StreamEvent]:
        type(self).streaming(self.config, concurrency)
        self.arrived.append(arrivals)
        self.order.append(f"{self.config.speculation.algorithm}/{self.config.speculation.schedule}/{concurrency}")
        each = repeat(params) if isinstance(params, SamplingParams) else params
        requests = zip(count(), prompts, each, strict=False)
        # Prompts are taken as far as the concurrency allows, and completions arrive in another order than the input's.
        while taken := list(islice(requests, None if arrivals is not None else concurrency)):
            for index, prompt, own in reversed(taken):
                yield from self._answer(index, prompt, own)

    def _answer(self, index: int, prompt: Any, params: SamplingParams) -> Iterator[StreamEvent]:
        if self.interrupt_after == 0:
            raise KeyboardInterrupt
        if self.interrupt_after is not None:
            type(self).interrupt_after = self.interrupt_after - 1
        for sample in range(params.n):
            completion = replace(self._complete(index, prompt, params), sample=sample)
            self.done.append(completion)
            for token in completion.token_ids:
                yield StreamEvent(index, [token], None, sample=sample)
            yield StreamEvent(index, [], completion, completion.text, sample)

    def check(self, tokens: list[int], params: SamplingParams, index: int | None = None) -> None:
        if len(tokens) + params.max_new_tokens > self.caps["max_model_len"]:
            raise refuse("prompt", f"{len(tokens)} tokens", "too long for the stub")

    def forget_prefixes(self) -> None:
        type(self).forgot += 1

    def reset_record(self, *, rows: bool = True) -> None:
        self.done = []

    def record(self, *, concurrency: int | None = None, workload: dict[str, Any] | None = None) -> RunRecord:
        return RunRecord(
            config=self.config.as_dict(),
            caps=self.caps,
            metrics=summarize(self.done, 2.0, concurrency),
            counters={},
            requests=[completion.as_row() for completion in self.done],
            workload=workload or {},
        )

    def _complete(self, index: int, prompt: Any, params: SamplingParams) -> Completion:
        prompt = type(self).answering(prompt, params)
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        self.check(ids, params)
        if ids[:5] == list(b"!fail"):
            return Completion(index, list(ids), [], "", "error", RequestMetrics(), error="its logits are not finite")
        tokens = [(ids[-1] + step) % 256 for step in range(1, params.max_new_tokens + 1)]
        drafted = self.config.speculation.num_drafts
        emitted = len(tokens) - 1
        metrics = RequestMetrics(
            prompt_tokens=len(ids), output_tokens=len(tokens), ttft_s=0.25, tpot_s=0.01, e2e_s=0.5,
            emitted=emitted, verify_steps=emitted // 2 or 1 if drafted else emitted,
            drafted=drafted * emitted, accepted=emitted // 2,
        )  # fmt: skip
        metrics.accept_length = metrics.emitted / metrics.verify_steps if metrics.verify_steps else None
        return Completion(index, list(ids), tokens, self.tokenizer.decode(tokens), "length", metrics)


@pytest.fixture
def engine(use_packages: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[StubEngine]:
    """The stub instead of the engine, a stub of the model registry, and an empty working folder."""

    class Engine(StubEngine): ...

    module = types.ModuleType("specbatch.engine.engine")
    module.Engine = Engine  # type: ignore[attr-defined]
    use_packages({"specbatch.engine.engine": module})
    monkeypatch.setattr("specbatch.engine.setup.prepare.prepare", lambda config, say: Engine.preparing(config))
    monkeypatch.setattr("specbatch.sweeps.run.unloaded.check_machine", Engine.unloaded)
    monkeypatch.setattr("specbatch.sweeps.run.loading.shared_pages", lambda configs: None)
    monkeypatch.chdir(tmp_path)
    return Engine


@pytest.fixture
def run(engine: type[StubEngine]) -> Callable[..., Result]:
    """Run one command line, with room for its tables: run("sweep", "--repeats", 2)."""
    from specbatch.cli.app import app

    def call(*words: object) -> Result:
        result = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "1000"})
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return call


@pytest.fixture
def run_toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Callable[..., Result]]:
    """`run_toy(words)(command, exit_code=0)`: a command with these words at its end, in an empty working folder."""
    from specbatch.cli.app import app

    monkeypatch.chdir(tmp_path)

    def with_words(words: Sequence[str]) -> Callable[..., Result]:
        def call(command: str, exit_code: int = 0) -> Result:
            result = CliRunner().invoke(app, [*command.split(), *words], env={"COLUMNS": "1000"})
            assert result.exit_code == exit_code, result.output
            return result

        return call

    return with_words


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., Path]:
    """Write rows (or raw lines) to a file and return its path."""

    def write(*rows: Any, name: str = "in.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return path

    return write


@pytest.fixture
def swept(run: Callable[..., Result], tmp_path: Path) -> Path:
    """A sweep: out/baseline, out/v1, out/v2 at concurrency 1."""
    result = run("sweep", "--concurrency", "1", "--repeats", 2, "--output", tmp_path / "out", *SMALL_SWEEP)
    assert result.exit_code == 0, result.output
    return tmp_path / "out"


@pytest.fixture
def resumed(run: Callable[..., Result], engine: type[StubEngine], jsonl: Callable[..., Path], tmp_path: Path) -> Path:
    """Jobs of 12 prompts with speculation: a.jsonl ran in one go, b.jsonl was interrupted after 5 and continued."""
    prompts = [{"prompt_token_ids": [number]} for number in range(12)]

    def generate(name: str, *words: object) -> Result:
        drafts = ("--device", "cpu", "--spec", "v1", "--temperature", 1)
        return run("generate", jsonl(*prompts), "-o", tmp_path / name, "--max-new-tokens", 5, *words, *drafts)

    assert generate("a.jsonl").exit_code == 0
    engine.interrupt_after = 5
    assert generate("b.jsonl").exit_code == 130
    engine.interrupt_after = None
    assert generate("b.jsonl").exit_code == 0
    return tmp_path


@pytest.fixture
def plots() -> None:
    """For tests whose sweeps draw plots, which takes seconds."""


@pytest.fixture(autouse=True)
def undrawn(request: pytest.FixtureRequest) -> None:
    if "plots" not in request.fixturenames:
        request.getfixturevalue("no_report")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Engine]]:
    """The folder of a tiny model, and an engine that has it."""
    from checkpoints import TINY, write_folder

    from specbatch.engine.engine import Engine

    folder = write_folder(tmp_path_factory.mktemp("model") / "tiny", TINY | {"max_position_embeddings": 512})
    with Engine(EngineConfig(model=str(folder), device="cpu", max_model_len=512)) as engine:
        yield folder, engine


@pytest.fixture
def server(tiny: tuple[Path, Engine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> EngineServer:
    """The tiny model behind OpenAI's API, and an empty working folder."""
    from engine_server import EngineServer

    monkeypatch.setattr("specbatch.evals.server_lm.PAUSE_S", 0.0)
    monkeypatch.chdir(tmp_path)
    return EngineServer(tiny[1])
