"""Memory and speed of a long batch job: `generate` with many short prompts on a tiny model with random weights.

The resident set size of the process is sampled every second, from the first pass over the input to the finished output.
"""

from __future__ import annotations

import csv
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, NamedTuple

import psutil
import typer

from specbatch import Engine, EngineConfig, SamplingParams
from specbatch.errors import refuse
from specbatch.jobs.batch_job import BatchJob
from specbatch.sweeps.microbench.runner import Row, Table
from specbatch.sweeps.report.plot_style import BLUE, VERMILLION, panels, style, svg

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "eos_token_id": 256,
    "torch_dtype": "float32",
}
MIB = 1 << 20


class Sample(NamedTuple):
    """The state of the process at one time. seconds: since the start of the job."""

    seconds: float
    rows: int
    rss_mib: float


def tables(
    prompts: Annotated[int, typer.Option(min=10, help="Rows of the input.")] = 20_000,
    max_running: Annotated[int, typer.Option(min=1)] = 128,
    new_tokens: Annotated[int, typer.Option(min=1)] = 4,
    out: Annotated[Path | None, typer.Option(help="Write OUT.csv and OUT.svg.")] = None,
) -> Iterator[Table]:
    if out is not None and not out.absolute().parent.is_dir():
        raise refuse("out", str(out), "there is no such folder; create it, or name a file in another")
    samples = measure(prompts, max_running, new_tokens)
    yield Table([_row(prompts, samples)])
    if out is not None:
        _write(out, samples)


def measure(prompts: int, max_running: int, new_tokens: int) -> list[Sample]:
    """Run the job, and sample the process every second."""
    with TemporaryDirectory(prefix="specbatch-") as made:
        folder = Path(made)
        (folder / "config.json").write_text(json.dumps(MODEL))
        source = folder / "in.jsonl"
        with source.open("w") as file:
            for number in range(prompts):
                file.write(json.dumps({"prompt": f"Question {number}: {number * 7919 % 1000}", "id": number}) + "\n")
        config = EngineConfig(
            model=str(folder), load_format="dummy", device="cpu", max_running=max_running, max_model_len=64
        )
        with Engine(config) as engine, _Sampler() as sampler:
            engine.reset_record(rows=False)
            job = BatchJob.open(source, folder / "out.jsonl", config, SamplingParams(max_new_tokens=new_tokens))
            sampler.job = job
            job.run(engine)
            with (folder / "out.jsonl").open("rb") as file:
                assert sum(1 for _ in file) == prompts
        return sampler.samples


class _Sampler:
    """Samples the process in a thread every second, and at the end."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.job: BatchJob | None = None
        self._done = threading.Event()
        self._start = time.perf_counter()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> _Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self._take()

    def _run(self) -> None:
        while True:
            self._take()
            if self._done.wait(1.0):
                return

    def _take(self) -> None:
        rows = 0 if self.job is None else len(self.job.finished)
        rss = psutil.Process().memory_info().rss / MIB
        self.samples.append(Sample(round(time.perf_counter() - self._start, 2), rows, round(rss, 1)))


def _row(prompts: int, samples: list[Sample]) -> Row:
    first, last = (rate_between(samples, *part) for part in ((0, prompts // 10), (prompts - prompts // 10, prompts)))
    after = next(item for item in samples if item.rows >= prompts // 10)
    return {
        "prompts": prompts,
        "seconds": f"{samples[-1].seconds:.0f}",
        "rows/s, first tenth": f"{first:.0f}",
        "rows/s, last tenth": f"{last:.0f}",
        "MiB after a tenth": f"{after.rss_mib:.0f}",
        "MiB at the end": f"{samples[-1].rss_mib:.0f}",
        "most MiB": f"{max(item.rss_mib for item in samples):.0f}",
    }


def rate_between(samples: list[Sample], low: int, high: int) -> float:
    """Rows per second between the last sample with at most `low` rows and the first one with at least `high`."""
    begin = [item for item in samples if item.rows <= low][-1]
    end = next(item for item in samples if item.rows >= high)
    return (end.rows - begin.rows) / (end.seconds - begin.seconds)


def _write(out: Path, samples: list[Sample]) -> None:
    with out.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([Sample._fields, *samples])
    out.with_suffix(".svg").write_text(plot(samples))


def plot(samples: list[Sample]) -> str:
    """An SVG with the memory and the finished rows over time."""
    with style():
        figure, (above, below) = panels(2, 2.2)
        seconds = [item.seconds for item in samples]
        above.plot(seconds, [item.rss_mib for item in samples], color=VERMILLION)
        above.set_ylim(bottom=0)
        above.set_ylabel("resident memory (MiB)")
        below.plot(seconds, [item.rows for item in samples], color=BLUE)
        below.set_ylabel("finished rows")
        below.set_xlabel("seconds")
        return svg(figure, "memory")
