"""Points of a sweep on an engine: the warm-up, and requests that run alone."""

from __future__ import annotations

from typing import Any

import pytest
from crossed import crossed, first_quick
from thread_replicas import ThreadReplicas

from specbatch import DataParallelEngine, Engine
from specbatch.config.engine_config import EngineConfig
from specbatch.config.speculation import Speculation
from specbatch.records.sweep_plan import Point
from specbatch.sweeps.run.benchmark import Benchmark, BenchmarkPrompts, SweepOptions
from specbatch.sweeps.run.configurations import named
from specbatch.sweeps.run.loading import loaded
from specbatch.sweeps.run.sweep import what_is_kept
from specbatch.sweeps.workload.workloads import Workload


def prompts_of(work: Workload, engine: Any, concurrency: int) -> BenchmarkPrompts:
    return Benchmark(SweepOptions((concurrency,), workload=work)).prepare({"v2": engine}, engine.tokenizer)


EAGLE3 = Speculation("eagle3", draft="dummy", simulate_accept_length=2.0)
CORPUS = Speculation("ngram", corpus="run", corpus_tokens=1024)


@pytest.mark.parametrize(
    ("speculation", "concurrency", "per_concurrency"), crossed([Speculation(), EAGLE3], [(12, 1), (7, 2)])
)
def test_warm_up_on_a_gpu_runs_a_full_batch(speculation: Speculation, concurrency: int, per_concurrency: int) -> None:
    """Prompts are computed one after the other, and the first has not ended when the last begins."""
    config = EngineConfig(
        model="toy", load_format="dummy", device="cpu", page_size=4, prefill_chunk=10, speculation=speculation
    )
    work = Workload(input_len=10, output_len=200, prompts_per_concurrency=per_concurrency)
    with Engine(config) as engine:
        engine.caps["device"] = "cuda:0"
        prompts_of(work, engine, concurrency).warm_up(engine, concurrency)
        counters = engine.record().counters
    assert str(concurrency) in counters["steps_by_rows"]
    # No more requests than run at once, and in a closed loop one that takes the slot of another.
    assert counters["prefill_passes"] == concurrency + (per_concurrency > 1)


@pytest.mark.parametrize(("concurrency", "share"), first_quick(1, [(3, 2), (8, 4)]))
def test_warm_up_gives_each_replica_a_full_batch(concurrency: int, share: int) -> None:
    config = EngineConfig(
        model="toy", load_format="dummy", device="cpu", prefill_chunk=10, memory_fraction=0.2, data_parallel=2
    )
    work = Workload(input_len=10, output_len=40, prompts_per_concurrency=4)
    with DataParallelEngine(config, starter=ThreadReplicas(2)) as engine:
        engine.caps["device"] = "cuda:0"
        prompts_of(work, engine, concurrency).warm_up(engine, concurrency)
        counters = engine.record().counters
    steps, _ = counters["steps_by_rows"][str(share)]
    assert {*counters["steps_by_rows"]} <= {*map(str, range(share + 1))}
    assert steps > 0
    assert counters["prefill_passes"] == 2 * share + 2


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_each_repeat_begins_without_the_answers_of_earlier_ones(prefix_cache: bool) -> None:
    """Else the second would accept nearly all drafts."""
    config = EngineConfig(
        model="toy",
        load_format="dummy",
        device="cpu",
        prefix_cache=prefix_cache,
        speculation=CORPUS,
        memory_fraction=0.2,
    )
    work = Workload(input_len=40, output_len=20, prompts_per_concurrency=2)
    with Engine(config) as engine:
        made = prompts_of(work, engine, 2)
        records = [made.measure(engine, Point("v2", 0, 2, repeat), lambda: None).record for repeat in (1, 2)]
        engine.reset_record()
        engine.generate(made.prompts, made.params, concurrency=2)
        again = engine.record()
    lengths = [record.metrics["accept_length"] for record in records]
    assert lengths[0] == lengths[1] < again.metrics["accept_length"] - 1


def test_a_configuration_that_cannot_run_is_tried_once_and_leaves_the_draft_to_the_others() -> None:
    base = EngineConfig(model="toy", load_format="dummy", device="cpu", kv_pages=40, speculation=EAGLE3)
    lines, failed = list[str](), dict[str, str]()
    with loaded(named(base, ["baseline", "v2+piecewise", "v2"]), lines.append, failed=failed) as engines:
        assert [*engines] == ["baseline", "v2"]
    assert failed.keys() == {"v2+piecewise"}
    assert failed["v2+piecewise"].startswith("graphs.prefill='piecewise': needs a CUDA device")
    assert [line for line in lines if "piecewise" in line] == [f"v2+piecewise: {failed['v2+piecewise']}"]


def test_tables_are_named_only_where_a_point_was_finished() -> None:
    """Without one, sweep and bench write none, and remove the folder."""
    assert what_is_kept(0, "the tables in out") == "no point was finished"
    works = "the same command with this --out continues"
    assert what_is_kept(1, "the tables in out") == f"kept 1 finished point and the tables in out; {works}"
