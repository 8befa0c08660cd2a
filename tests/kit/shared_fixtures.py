"""Fixtures of all tests, and settings of what they import."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any

import crossed
import lossless
import pytest
import torch
import typer.testing
from fake_ray import FakeRay
from forked_templates import fork_templates
from hypothesis import HealthCheck, settings
from opening import opening
from targets import Targets
from toy import Toy, ToyBlock, ToyCheckpoint
from typer.main import get_command
from watched_calls import Watch, watch_with

from specbatch.config.engine_config import EngineConfig, Graphs
from specbatch.models.formats.format import Format
from specbatch.records import low_acceptance
from specbatch.text import chat_template
from specbatch.weights import known_models

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"].split(",")[0]))  # where a plugin imported torch earlier

# No test sees whether a file survives a power failure, and a disk takes milliseconds for each of thousands of files.
os.fsync = os.fstat  # type: ignore[assignment]  # which refuses a closed file, too

# The bundled model is read whole at each opening to check it; a file that was not written since has the same hash.
_hash, _of_state = known_models.file_hash, cache(lambda path, *_: _hash(path))


def _hash_once(path: Path) -> str:
    state = path.stat()
    return _of_state(path, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)


known_models.file_hash = _hash_once

# Without a GPU, `torch.manual_seed` keeps a stack trace for each device that might come.
_seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed

settings.register_profile(
    "whole",
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
settings.register_profile("quick", settings.get_profile("whole"), max_examples=20)
settings.load_profile("whole")

# The runner makes all commands and their options again for each call, which takes longer than most of the calls.
typer.main.get_command = typer.testing._get_command = cache(get_command)  # type: ignore[attr-defined]


def pytest_configure(config: pytest.Config) -> None:
    """Cases that are not run need not be made: there are some forty thousand."""
    crossed.only_quick = lossless.only_quick = config.option.markexpr == "not slow"
    settings.load_profile("quick" if crossed.only_quick else "whole")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Random inputs of a test without a generator of its own depend neither on the run nor on other tests."""
    _seed(0)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """`watch(owner, name, before=..., after=...)` watches the calls of a method or function, which run as they are.
    Returns the list, filled as they come, of what `before(*arguments)` and `after(result, *arguments)` return."""
    return watch_with(monkeypatch)


@pytest.fixture
def use_prefill(monkeypatch: pytest.MonkeyPatch) -> Callable[[object], None]:
    """`use_prefill(backend)`: engines compute the attention of prompts with it, whatever their device and settings."""
    return lambda backend: monkeypatch.setattr(
        "specbatch.engine.setup.prepare.prefill_backend", lambda *_, **__: backend
    )


@pytest.fixture
def use_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """`use_memory(size)`: engines find so many bytes available on any device."""
    return lambda size: monkeypatch.setattr("specbatch.engine.setup.memory_plan.available_memory", lambda device: size)


@pytest.fixture
def stopped_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """`stopped_after(count)`: a rank counts as stopped after so many beats without an answer."""
    return lambda count: monkeypatch.setattr("specbatch.engine.ranks.rank_group.SILENT_BEATS", count)


@pytest.fixture
def low_acceptance_from(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """`low_acceptance_from(count)`: after so many verifies every acceptance below 100% counts as low."""

    def use(count: int) -> None:
        monkeypatch.setattr(low_acceptance, "LOW_SHARE", 1.01)
        monkeypatch.setattr(low_acceptance, "MIN_VERIFIES", count)

    return use


@pytest.fixture
def stay_quantized(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`stay_quantized()`: weights stay quantized on a CPU, too, as on a GPU; `stay_quantized(False)`: nowhere."""
    return lambda keeps=True: monkeypatch.setattr(Format, "runs_on", staticmethod(lambda device: keeps))


@pytest.fixture(scope="session", autouse=True)
def _templates_are_forks() -> Generator[None]:
    with pytest.MonkeyPatch.context() as patch:
        end = fork_templates(patch)
        yield
        end()


@pytest.fixture
def template_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chat templates are rendered in processes of their own, as in use."""
    monkeypatch.setattr(chat_template, "subprocess", subprocess)


@pytest.fixture(scope="session")
def toy() -> Toy:
    return Toy()


@pytest.fixture(scope="session")
def open_toy() -> Callable[..., ToyCheckpoint]:
    """In place of `specbatch.weights.open_checkpoint`."""

    def opened(model: str, load_format: str = "auto", **_: Any) -> ToyCheckpoint:
        return ToyBlock(model) if model.startswith("toy-block") else ToyCheckpoint(model)

    return opened


@pytest.fixture(scope="session")
def toy_engine(open_toy: Callable[..., ToyCheckpoint]) -> Callable[..., Any]:
    """`toy_engine(**settings of EngineConfig)` builds an Engine over the toy model, whatever weights are installed."""
    from specbatch.engine.engine import Engine

    def build(
        log: Callable[[str], None] | None = None, report: Callable[[int, int], None] | None = None, **config: Any
    ) -> Engine:
        config = {"model": "toy", "device": "cpu", "max_running": 8, "max_model_len": 120, "page_size": 4} | config
        config = {"load_format": "dummy"} | config  # of no matter to the toy; heads of drafters are then random
        with opening(open_toy):
            return Engine(EngineConfig(**config), log=log, report=report)

    return build


@pytest.fixture
def graph_engine(toy_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Engines with whole decode graphs and piecewise prefill graphs."""
    from stand_ins import fake_graphs

    fake_graphs(monkeypatch)
    return partial(toy_engine, graphs=Graphs(decode="whole", prefill="piecewise"), prefill_chunk=48)


@pytest.fixture(scope="session")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Targets:
    return Targets(tmp_path_factory.mktemp("heads"))


@pytest.fixture
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes most of the time of a report."""
    monkeypatch.setattr("specbatch.sweeps.report.report.draw_all", lambda records: [])
    monkeypatch.setattr("specbatch.sweeps.report.context_plot.context_plot", lambda *_, **__: "<svg/>")


@pytest.fixture
def known_speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dry run on a CPU does not measure it, which takes most of its time."""
    monkeypatch.setattr("specbatch.sweeps.run.estimate.cpu_speeds", lambda: (1e10, 1e11))


@pytest.fixture
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sweeps end without the report, most of which is plots."""
    monkeypatch.setattr("specbatch.cli.sweep.write_reports", lambda folder: [])


@pytest.fixture
def use_checkpoints() -> Generator[Callable[[Callable[..., Any]], None]]:
    """`use_checkpoints(opened)`: the rest of the test is within `opening(opened)`."""
    with ExitStack() as stack:
        yield lambda opened: stack.enter_context(opening(opened))


@pytest.fixture
def use_tokenizer(monkeypatch: pytest.MonkeyPatch) -> Callable[[object], None]:
    """`use_tokenizer(tokenizer)`: every model, also that of a server, has it."""
    return lambda tokenizer: monkeypatch.setattr("specbatch.weights.open_tokenizer", lambda name, log=None: tokenizer)


@pytest.fixture
def use_packages(monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[str, object]], None]:
    """`use_packages({name: module})`: imports find these modules; None: as if it were not installed."""

    def use(found: Mapping[str, object]) -> None:
        for name, module in found.items():
            monkeypatch.setitem(sys.modules, name, module)  # type: ignore[arg-type]

    return use


@pytest.fixture
def fake_ray(use_packages: Callable[[Mapping[str, object]], None]) -> FakeRay:
    """What `import ray` finds."""
    found = FakeRay()
    use_packages({"ray": found})
    return found


@pytest.fixture(scope="session")
def _tasks_are_read_once() -> Generator[None]:
    """For tests of evaluations: each finds its task among definitions of lm-eval that no test changes, and converts
    the bundled rows, which are more than a test would make."""
    import datasets
    from lm_eval.tasks import _index

    load, folder, convert = _index.load_yaml, Path(_index.__file__).parent, datasets.Dataset.from_list
    converted: dict[int, tuple[list[Any], Any]] = {}

    @cache
    def loaded(path: Path, **how: bool) -> bytes:
        return pickle.dumps(load(path, **how))

    def load_once(path: Path, **how: bool) -> Any:
        return pickle.loads(loaded(path, **how)) if folder in path.parents else load(path, **how)

    def convert_once(rows: list[Any], *how: Any) -> Any:
        if how or len(rows) < 1000:
            return convert(rows, *how)
        if id(rows) not in converted:
            converted[id(rows)] = rows, convert(rows)
        return converted[id(rows)][1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_index, "load_yaml", load_once)
        patch.setattr(datasets.Dataset, "from_list", convert_once)
        yield


@pytest.fixture
def use_hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], None]:
    """`use_hub(load)`: `load(path, name, ...)` is asked for the data sets of the hub."""
    return lambda load: monkeypatch.setattr("datasets.load_dataset", load)


@pytest.fixture
def no_hub(use_hub: Callable[[Callable[..., Any]], None]) -> None:
    """Any attempt to reach the hub or its cache fails the test."""
    use_hub(lambda *_, **__: pytest.fail("the hub is asked"))


@pytest.fixture
def use_gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """`use_gpus(count)`: torch sees this many CUDA devices."""

    def use(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return use


@pytest.fixture
def short_renderings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chat templates have a small part of the usual time, so that what ignores the limit is seen soon."""
    monkeypatch.setattr("specbatch.text.chat_template.CPU_SECONDS", 0.3)
