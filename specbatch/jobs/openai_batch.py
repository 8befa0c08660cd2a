"""OpenAI batch files: requests for /v1/chat/completions and /v1/completions, one JSON object per line.

Input       https://platform.openai.com/docs/guides/batch: custom_id, method, url, body
Output      {"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error": null}
Error file  the same, with a `response` of status 400 (a bad request) or 500, and `error` with code and message

A row that asks for something that is not supported becomes an error row; nothing is ignored silently.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from specbatch.config.field_errors import first_problem
from specbatch.core.completion import Completion
from specbatch.core.sampling_params import SamplingParams
from specbatch.errors import SpecbatchError, refuse_json
from specbatch.jobs.chat_output import ChatOutput
from specbatch.jobs.dataset import is_dataset
from specbatch.jobs.formats import BadRow, JobFormat, JobRow, Request
from specbatch.jobs.input_version import InputVersion
from specbatch.jobs.openai_request import BODIES, ChatBody, CompletionBody, Envelope, UnsupportedError, envelope_of
from specbatch.jobs.openai_response import error_response, response_body
from specbatch.jobs.openai_tools import ToolUse
from specbatch.jobs.partial_output import Row, row_seed
from specbatch.jobs.prompt_file import stream_rows
from specbatch.jobs.prompts import HALF_PAIR, PER_ROW, MalformedRowError, Prompt, as_text, no_text_in, parse_row
from specbatch.memory.page_pool import reserved_length

if TYPE_CHECKING:
    from specbatch.engine.interface import InferenceEngine
    from specbatch.text.tokenizer import Tokenizer

_KEYS = {"custom_id", "method", "url", "body"}
_LINES_TO_DETECT = 100
_NAMES_SHOWN = 3
# Fields of a request by the names that errors have for them.
_NAMES = {
    "json_schema": "response_format",
    "thinking": "chat_template_kwargs.enable_thinking",
    "tools": "tools",
}


def is_openai_batch(source: str | Path) -> bool:
    """Whether the first line of JSON among the first 100 lines is a request of an OpenAI batch."""
    if is_dataset(source):
        return False
    for _, line in islice(stream_rows("input", source, ()), _LINES_TO_DETECT):
        try:
            row = parse_row(line)
        except MalformedRowError:
            continue
        return isinstance(row, dict) and len(_KEYS & row.keys()) > 1
    return False


class OpenAIBatch(JobFormat):
    """Rows of an OpenAI batch. Sampling parameters that a request leaves out are OpenAI's, or those in `given`.

    given   values of `SamplingParams` that the user set for all rows
    """

    keeps_bad_rows = True
    unique_ids = True

    def __init__(
        self,
        source: str | Path,
        given: Mapping[str, Any],
        *,
        seed: int,
        chat_template: bool,
        model: str,
        log: Callable[[str], None],
    ) -> None:
        self._source, self._given, self._seed = source, dict(given), seed
        self._version = InputVersion("input", source)
        self._chat_template, self._model, self._log = chat_template, model, log
        self._has_grammar = any(given.get(name) is not None for name in ("regex", "json_schema"))
        self._output: ChatOutput | None = None
        self._noted_form = False
        self._other_models: dict[str, None] | None = {}  # names that the file asks for; None once they are logged

    def rows(self) -> Iterator[JobRow | BadRow]:
        for number, raw in stream_rows("input", self._source, (), version=self._version):
            yield self._row(number - 1, raw)
        if self._other_models:
            names = ", ".join(self._other_models)
            self._log(f"model: the requests name {names}; all of them run on {self._model}")
        self._other_models = None

    def _row(self, index: int, raw: bytes | Any) -> JobRow | BadRow:
        value: Any = None
        try:
            value = parse_row(raw)
            is_plain = isinstance(raw, bytes) and b"\\u" not in raw
            if not is_plain and (place := no_text_in(value)) is not None:
                raise UnsupportedError(f"{place} {HALF_PAIR}")
            envelope = envelope_of(value)
            body = BODIES[envelope.url].read(envelope.body)
            params = SamplingParams.of_row(body.sampling(self._given))
        except (MalformedRowError, UnsupportedError) as error:
            problem = str(error)
        except ValidationError as error:
            problem = first_problem(error, prefix="" if error.title == Envelope.__name__ else "body.")
        except SpecbatchError as error:
            problem = _of_body(error)
        else:
            self._note_model(body.model)
            return JobRow(index, envelope.custom_id, body, params, [index, value])
        found = value.get("custom_id") if isinstance(value, dict) else None
        identity = [index, value if value is not None else repr(raw)]
        return BadRow(index, as_text(found) if isinstance(found, str) else None, problem, identity)

    def encode(self, row: JobRow, engine: InferenceEngine) -> list[Request]:
        body: ChatBody | CompletionBody = row.request
        try:
            return [self._request(row, place, *prompt, engine) for place, prompt in enumerate(body.prompts())]
        except SpecbatchError as error:
            raise SpecbatchError(_of_body(error)) from None

    def _request(self, row: JobRow, place: int, form: str, value: Any, engine: InferenceEngine) -> Request:
        body: ChatBody | CompletionBody = row.request
        params = row.params
        use = tools = None
        if isinstance(body, ChatBody):
            use, tools = body.use, body.shown_tools
        tokens = Prompt(row.index + 1, form, value).encode(
            engine.tokenizer,
            chat_template=self._chat_template,
            thinking=body.thinking,
            most=engine.caps["max_model_len"],
            tools=tools,
        )
        if isinstance(body, ChatBody) and body.limit is None and "max_new_tokens" not in self._given:
            params = replace(params, max_new_tokens=max(params.min_tokens, _room(engine, len(tokens)), 1))
        if params.seed is None:
            params = params.with_seed(row_seed(self._seed, f"{row.index}/{place}" if place else row.index))
        if use is not None:
            params = self._with_calls(params, use, tokens, engine)
        engine.check(tokens, params)
        return tokens, params

    def _with_calls(
        self, params: SamplingParams, use: ToolUse, prompt: list[int], engine: InferenceEngine
    ) -> SamplingParams:
        """Parameters with the grammar of calls, where they have one."""
        output = self._output_of(engine)
        if output.form is None:
            self._note_form(engine.tokenizer)
        if (regex := output.grammar(use, prompt)) is None:
            return params
        try:
            found = params.updated({"regex": regex})
            engine.check(prompt, found)
        except SpecbatchError as error:
            if error.setting != "regex":
                raise
            works = f"the grammar of their calls is refused ({error.works}); use auto without strict"
            raise refuse_json("tools", [function.name for function in use.callable], works) from None
        return found

    def _output_of(self, engine: InferenceEngine) -> ChatOutput:
        if self._output is None:
            self._output = ChatOutput(engine.tokenizer, has_grammar=self._has_grammar)
        return self._output

    def _note_form(self, tokenizer: Tokenizer) -> None:
        """Say once that calls cannot be told from the text of answers."""
        if not self._noted_form:
            self._log(f"note: tools: calls of {tokenizer.name} have no known form; they stay in the content of answers")
        self._noted_form = True

    def conversations(self, row: JobRow) -> list[Any]:
        body: ChatBody | CompletionBody = row.request
        if isinstance(body, ChatBody) and (body.use is not None or body.thinking is not None):
            return []
        return [value for form, value in body.prompts() if form == "messages" and self._chat_template]

    def answer(self, row: JobRow, completions: Sequence[Sequence[Completion]], engine: InferenceEngine) -> Row:
        name = self._name(row)
        content = response_body(name, self._model, row.request, completions, self._output_of(engine))
        return self._start(row) | {
            "response": {"status_code": 200, "request_id": f"req_{name}", "body": content},
            "error": None,
        }

    def failure(self, row: JobRow | BadRow, reason: str) -> Row:
        if row.id is None:  # nothing else tells which row it is
            reason = f"line {row.index + 1}: {reason}"
        response, error = error_response(500 if isinstance(row, JobRow) else 400, reason)
        return self._start(row) | {"response": response | {"request_id": f"req_{self._name(row)}"}, "error": error}

    def is_kept(self, row: Row) -> bool:
        return {"custom_id", "response", "error"} <= row.keys()

    def output_rows(self, kept: Row) -> Iterable[Row]:
        return [{name: value for name, value in kept.items() if name != "index"}]

    def kept_rows(self, output: Iterable[Row]) -> Iterator[Row]:
        """The output has the order of the input, so that one pass over both finds the index of each row."""
        remaining = iter(output)
        row = next(remaining, None)
        for item in self.rows():
            if row is not None and isinstance(item, JobRow) and item.id == row.get("custom_id"):
                yield {"index": item.index, **row}
                row = next(remaining, None)

    def _start(self, row: JobRow | BadRow) -> Row:
        return {"index": row.index, "id": f"batch_req_{self._name(row)}", "custom_id": row.id}

    def _name(self, row: JobRow | BadRow) -> str:
        """A name that depends on the row only, so that a job that is run again gives the same ids."""
        return hashlib.sha256(f"{self._seed}/{row.index}/{row.id}".encode()).hexdigest()[:32]

    def _note_model(self, name: str) -> None:
        if self._other_models is not None and name != self._model and len(self._other_models) < _NAMES_SHOWN:
            self._other_models[name] = None


def _of_body(error: SpecbatchError) -> str:
    """The message of an error about a request, in its own terms."""
    name = _NAMES.get(str(error.setting), error.setting)
    if name in PER_ROW or name in _NAMES.values():
        error = refuse_json(f"body.{name}", error.value, error.works or "")
    return str(error).replace("max_new_tokens", "max_tokens")


def _room(engine: InferenceEngine, prompt_tokens: int) -> int:
    """The longest answer that the engine can give to a prompt: OpenAI's limit if a chat request sets none."""
    caps = engine.caps
    pool = caps["kv_pages"] * caps["page_size"] - reserved_length(0, caps["verify_slots"])
    return int(min(caps["max_model_len"], pool) - prompt_tokens)
