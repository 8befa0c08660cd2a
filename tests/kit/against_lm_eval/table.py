"""The table of cases: `python tests/kit/against_lm_eval/table.py --out FILE`."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import datasets
import transformers

from against_lm_eval import cases, models, runs, tasks
from specbatch import Engine, SpecbatchError
from specbatch.records.markdown import markdown_table


class Result(NamedTuple):
    case: cases.Case
    compared: int
    different: dict[str, str]
    seconds: tuple[float, float]


class Bench:
    """The models, task files and engines of all cases, in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        datasets.config.HF_DATASETS_CACHE = folder / "datasets"
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self.tasks = runs.write_tasks(folder / "tasks", tasks.TASKS | tasks.GROUPS, tasks.ROWS, tasks.FUNCTIONS)
        self.model = cache(lambda name: models.write(name, folder / name.replace(" ", "-")))
        self._engine: tuple[Any, Engine] | None = None

    def engine(self, case: cases.Case) -> Engine:
        """Of the case before if it has the same settings."""
        key = (case.model, dict(case.spec))
        if self._engine is None or self._engine[0] != key:
            self.close()
            self._engine = (key, runs.engine_of(self.model(case.model), case.spec))
        return self._engine[1]

    def close(self) -> None:
        if self._engine is not None:
            self._engine[1].close()
        self._engine = None

    def run(self, case: cases.Case) -> Result:
        folder, start = self.model(case.model), time.perf_counter()
        with runs.quiet():
            wanted = runs.theirs(folder, self.tasks, case.tasks, case.theirs, case.hflm)
        middle = time.perf_counter()
        try:
            found = runs.ours(self.engine(case), self.tasks, case.tasks, case.ours)
            different = runs.differences(runs.without(wanted, case.offset), found, case.aspects)
        except SpecbatchError as error:
            different = {"refused": str(error)}
        return Result(case, len(wanted.prompts), different, (middle - start, time.perf_counter() - middle))

    def run_as_model(self, case: cases.Case) -> dict[str, str]:
        """Differences between lm-eval's own backend and `lm_eval --model specbatch`."""
        folder, asked = self.model(case.model), (self.tasks, case.tasks, case.theirs)
        own = {"spec" if name == "schedule" else name: value for name, value in case.spec.items()}
        own |= {"truncation": True} if case.ours.get("truncate_prompts") else {}
        with runs.quiet():
            wanted = runs.theirs(folder, *asked, case.hflm)
            found = runs.as_model(folder, *asked, {**case.hflm, **own})
        return runs.differences(wanted, found, ("filtered", "metrics", "scores", "counts"))


LINK = "evaluation.md#models-for-measuring-accuracy"
HEADER = """# Cases against lm-eval

Each case runs twice on a CPU in float32, with lm-eval {lm_eval}'s own backend (`HFLM`; transformers {transformers},
torch {torch}), one prompt at a time, and with specbatch, by the options that mean the same. Compared are the token ids
of every prompt, limits, stop strings and sampling parameters, the answers (of texts that are scored: log-likelihoods to
1e-4, and whether a text is the greedy one), what each filter made of each answer, the metrics of each question, scores
with standard errors, and numbers of examples and questions. Of sampled answers only what was asked for is compared.

"tiny" models are random (2 layers, seeded), and `smollm2-135m` is the [bundled one]({link}).
[evaluation.md](evaluation.md#compared-with-lm-eval) explains the differences. The slow tests run the same cases, and
most of them with `lm_eval --model specbatch` as well. This page was made on 2 CPU cores by

```sh
{command}
```

"""
COMMAND = "python tests/kit/against_lm_eval/table.py --out docs/lm-eval-cases.md"


def page(results: list[Result]) -> str:
    """The table in Markdown."""
    rows = []
    for case, compared, different, _ in results:
        shown = "same"
        if different:
            shown = f"different: {', '.join(different)}"
            shown += f". {case.why}" if case.why else f". {'; '.join(different.values())}"
            shown += f"; the same with `{case.option}`" if case.option else ""
        rows.append({"case": case.name, "model": case.model, "requests": compared, "result": shown})
    names = ("lm_eval", "transformers", "torch")
    same = sum(not result.different for result in results)
    count = f"{len(results)} cases: {same} same, {len(results) - same} different.\n\n"
    versions = {name: version(name).partition("+")[0] for name in names}
    return HEADER.format(command=COMMAND, link=LINK, **versions) + count + markdown_table(rows) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write the table there")
    parser.add_argument("--only", default="", help="cases whose name has this")
    asked = parser.parse_args()
    results, status = [], 0
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        for case in cases.CASES:
            if asked.only not in str(case):
                continue
            try:
                result = bench.run(case)
            except Exception as error:
                print(f"FAILED  {case}: {type(error).__name__}: {error}")
                status = 1
                continue
            results.append(result)
            as_documented = set(result.different) == set(case.differs)
            status = status if as_documented else 1
            times = " + ".join(f"{seconds:.1f} s" for seconds in result.seconds)
            print(f"{'ok' if as_documented else 'WRONG'}  {case} ({times}): {result.different or 'same'}", flush=True)
        bench.close()
    if asked.out is not None and not status:
        asked.out.write_text(page(results))
    return status


if __name__ == "__main__":
    sys.exit(main())
