"""The process while lm-eval runs in it: seeded global generators, no logs and bars, templates in a sandbox."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache, partial
from io import StringIO
from typing import Any

from specbatch.errors import one_line, refuse


@dataclass(frozen=True)
class RandomState:
    """States of the global generators, which some tasks use to shuffle rows or to draw choices."""

    states: tuple[Any, Any]

    @classmethod
    def now(cls) -> RandomState:
        import numpy

        return cls((random.getstate(), numpy.random.get_state()))

    def restore(self) -> None:
        import numpy

        random.setstate(self.states[0])
        numpy.random.set_state(self.states[1])


def seed_globals() -> None:
    """Seed the global generators like lm-eval's simple_evaluate; some tasks shuffle rows or draw choices with them."""
    import numpy

    random.seed(0)
    numpy.random.seed(1234)


@contextmanager
def quiet(*, sandboxed: bool = True) -> Iterator[None]:
    """Silence the progress bars and logs of lm-eval and the data libraries; commands show their own progress. Templates
    are compiled once: lm-eval compiles one for each text, 24,000 for GSM8K, which takes longer than to generate.

    sandboxed: templates run in Jinja's sandbox, because they can be a user's; lm-eval's own render the same text
    """
    import datasets
    from lm_eval import utils
    from lm_eval.api import metrics
    from lm_eval.api import task as module

    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets", "huggingface_hub")]
    levels = [logger.level for logger in loggers]
    bar, bootstrap, env = module.tqdm, metrics.bootstrap_stderr, utils.env
    shows_bars = not datasets.are_progress_bars_disabled()
    try:
        datasets.disable_progress_bars()
        utils.env = _sandbox(env) if sandboxed else env.overlay()
        utils.env.from_string = cache(utils.env.from_string)
        metrics.bootstrap_stderr = _bootstrap_stderr
        module.tqdm = partial(bar, disable=True)  # TQDM_DISABLE is read at import, which is over
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        yield
    finally:
        if shows_bars:
            datasets.enable_progress_bars()
        module.tqdm, metrics.bootstrap_stderr, utils.env = bar, bootstrap, env
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _sandbox(env: Any) -> Any:
    """lm-eval's environment of templates, in which a template cannot reach Python's internals."""
    from jinja2 import BaseLoader
    from jinja2.sandbox import SandboxedEnvironment

    made = SandboxedEnvironment(
        loader=BaseLoader(), undefined=env.undefined, keep_trailing_newline=env.keep_trailing_newline
    )
    made.filters.update(env.filters)
    return made


@contextmanager
def template_errors(task: str) -> Iterator[None]:
    """Refuse `task` where one of its templates fails."""
    from jinja2 import TemplateError

    try:
        yield
    except TemplateError as error:
        raise refuse("task", task, f"a template of it fails: {one_line(error)}; correct its definition") from error


def _bootstrap_stderr(statistic: Callable[[Sequence[Any]], float], values: Sequence[Any], iters: int) -> float:
    """lm-eval's function, silent and within this process: a CUDA context does not survive a fork."""
    from lm_eval.api.metrics import _bootstrap_internal_no_mp, sample_stddev

    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        return float(sample_stddev(_bootstrap_internal_no_mp(statistic, values, iters)))
