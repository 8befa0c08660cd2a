"""Batch inference in a Ray Data pipeline: a class for `ray.data.Dataset.map_batches`.

config = EngineConfig("Qwen/Qwen3-8B", speculation=Speculation("ngram", "v2"))
answers = ray.data.read_parquet("prompts/").map_batches(
    GenerateBatch,
    fn_constructor_args=(config, SamplingParams(max_new_tokens=256)),
    batch_size=8192,
    num_gpus=1,
    concurrency=(1, 8),
)

Ray Data starts the actors, each with an engine, and runs the batches of one that is lost again. Between two batches an
engine empties, so a batch should have many times `max_running` rows, which is up to 1,024 on a GPU. `specbatch
generate --distributed ray` keeps engines full, and continues an interrupted job row by row.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from specbatch.config.engine_config import EngineConfig
from specbatch.core.completion import Completion
from specbatch.core.sampling_params import SamplingParams
from specbatch.errors import SpecbatchError, refuse
from specbatch.jobs.partial_output import row_seed
from specbatch.jobs.prompts import FORMS, MISPLACED, SAMPLING, MalformedLine, Prompt, PromptReader, params_of

if TYPE_CHECKING:
    from specbatch.engine.interface import InferenceEngine

Batch = dict[str, Any]  # of arrays, by column


class GenerateBatch:
    """Answers the prompts of a batch. Build it in the process that calls it: it loads the engine.

    A row has its prompt in one of the columns of `generate`: prompt, prompt_token_ids, question or messages, and may
    have its own parameters in a column `sampling`. A call
    returns the columns of the batch and adds text, token_ids, finish_reason, error (None unless the prompt failed),
    prompt_tokens, output_tokens and accept_length (NaN where nothing was verified).
    """

    def __init__(
        self,
        config: EngineConfig,
        params: SamplingParams | None = None,
        *,
        column: str | None = None,
        index: str | None = None,
        chat_template: bool = True,
    ) -> None:
        """column: of the prompt, if it has another name. index: of the number of a row, from which its seed follows, as
        in `generate`; None: the seed follows from the prompt, so that equal prompts have equal answers."""
        from specbatch.replicas.engine import engine_of

        self._params = params or SamplingParams()
        _refuse_samples(self._params)
        self._engine: InferenceEngine = engine_of(config)
        self._seed = config.seed if self._params.seed is None else self._params.seed
        self._reader = PromptReader(column=column)
        self._columns = FORMS if column is None else (column,)
        self._index, self._chat_template = index, chat_template
        self._noted = set[str]()

    def __call__(self, batch: Batch) -> Batch:
        count = len(next(iter(batch.values()), ()))
        self._note_misplaced(batch)
        prompts: dict[int, tuple[list[int], SamplingParams]] = {}
        errors: dict[int, str] = {}
        for number in range(count):
            row = {name: _plain(batch[name][number]) for name in (*self._columns, SAMPLING) if name in batch}
            try:
                prompt = self._read(number, row)
                tokens = self._encoded(prompt)
                by = str(tokens) if self._index is None else int(batch[self._index][number])
                params = params_of(prompt, self._params)
                _refuse_samples(params)
                if "seed" not in prompt.sampling:
                    params = params.with_seed(row_seed(self._seed, by))
                self._engine.check(tokens, params)
                prompts[number] = tokens, params
            except SpecbatchError as error:
                errors[number] = str(error)
        found = self._engine.generate([one for one, _ in prompts.values()], [params for _, params in prompts.values()])
        done: dict[int, Completion] = dict(zip(prompts, found, strict=True))
        errors |= {number: item.error for number, item in done.items() if item.error is not None}
        made = [done.get(number) for number in range(count)]
        return batch | {
            "text": _column("" if item is None else item.text for item in made),
            "token_ids": _column(np.array([] if item is None else item.token_ids, np.int32) for item in made),
            "finish_reason": _column("error" if item is None else item.finish_reason for item in made),
            "error": _column(errors.get(number) for number in range(count)),
            "prompt_tokens": np.array([0 if item is None else item.metrics.prompt_tokens for item in made], np.int64),
            "output_tokens": np.array([0 if item is None else item.metrics.output_tokens for item in made], np.int64),
            "accept_length": np.array(
                [
                    np.nan if item is None or item.metrics.accept_length is None else item.metrics.accept_length
                    for item in made
                ]
            ),
        }

    def _note_misplaced(self, batch: Batch) -> None:
        """Warn of columns that a user may take for parameters, each once."""
        if new := sorted(MISPLACED & batch.keys() - {*self._columns, self._index, *self._noted}):
            self._noted.update(new)
            works = f'parameters of a row go into the column "{SAMPLING}"'
            warnings.warn(f"{', '.join(new)} beside the prompt has no effect; {works}", stacklevel=3)

    def _read(self, number: int, row: Mapping[str, Any]) -> Prompt:
        prompt = self._reader.read(number + 1, row)
        if isinstance(prompt, MalformedLine):
            raise SpecbatchError(prompt.problem)
        return prompt

    def _encoded(self, prompt: Prompt) -> list[int]:
        most = self._engine.caps["max_model_len"]
        return prompt.encode(self._engine.tokenizer, chat_template=self._chat_template, most=most)


def _refuse_samples(params: SamplingParams) -> None:
    if params.n != 1:
        raise refuse("n", params.n, "a row has one answer; repeat the rows, with an index column")


def _plain(value: Any) -> Any:
    """A cell without numpy's types: arrays as lists, also inside of others, and without None, which a column of objects
    has for every key that a row lacks."""
    if isinstance(value, np.ndarray | list):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items() if item is not None}
    return value.item() if isinstance(value, np.generic) else value


def _column(values: Any) -> np.ndarray[Any, Any]:
    """An array of objects, one for each row."""
    listed = list(values)
    found = np.empty(len(listed), object)
    for number, value in enumerate(listed):
        found[number] = value
    return found
