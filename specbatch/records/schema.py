"""Schema of record.json, requests.jsonl and the output of `generate`.

Commands that read records rely on what is declared here: `validation.checked` refuses a file, perhaps edited by hand,
that breaks it. Fields that are not declared are kept and may hold anything. The modules that read questions.jsonl,
sweep.json and lm-eval's files declare those.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any, Literal, Self, TypeVar, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    create_model,
    field_validator,
    model_validator,
)

from specbatch.config.engine_config import Graphs
from specbatch.core.completion import RequestMetrics
from specbatch.records.metrics import METRICS
from specbatch.records.run_record import speculation_of
from specbatch.records.steps import Counters as StepCounters

_LARGEST = 1e15
# Numbers that go together: where the first one is not 0, the others must be there.
_GO_TOGETHER = {"iterations": ("iteration_s",), "device_steps": ("device_s", "device_idle_s")}

Number = Annotated[float, Field(ge=-_LARGEST * 1e3, le=_LARGEST * 1e3)]
Amount = Annotated[float, Field(ge=0, le=_LARGEST)]
Count = Annotated[int, Field(ge=0, le=int(_LARGEST))]
Positive = Annotated[int, Field(ge=1, le=int(_LARGEST))]
Range = Annotated[list[Positive], Field(min_length=2, max_length=2)]


def _is_count(text: str) -> str:
    if not (text.isascii() and text.isdigit() and len(text) <= 15):
        raise ValueError("should be a whole number")
    return text


def _is_flag(value: Any) -> Any:
    if not (value is None or isinstance(value, (bool, str))):
        raise ValueError("should be true, false or a text")
    return value


Flag = Annotated[Any, AfterValidator(_is_flag)]
CountText = Annotated[str, AfterValidator(_is_count)]


class Table(BaseModel):
    """Values as JSON has them: nothing is converted."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


T = TypeVar("T", bound=Table)


def _with_numbers_of(writer: type) -> Callable[[type[T]], type[T]]:
    """Decorate a table of a file: it also has the counts and times of the dataclass that writes the file, which are not
    negative, unless it declares them itself. Earlier versions may not have written them."""
    hints = get_type_hints(writer)
    types = {int: Count, float: Amount, float | None: Amount | None}
    numbers = {
        item.name: (types[hints[item.name]], item.default) for item in fields(writer) if hints[item.name] in types
    }

    def extend(table: type[T]) -> type[T]:
        own: dict[str, Any] = {name: kind for name, kind in numbers.items() if name not in table.model_fields}
        return create_model(table.__name__, __base__=table, __module__=__name__, **own)

    return extend


class _GraphModes(Table):
    model_config = ConfigDict(extra="forbid")

    decode: str
    prefill: str


class _Profile(Table):
    name: str
    conditional: list[Number]
    curve: list[Annotated[list[Number], Field(min_length=2, max_length=2)]] = []
    by_context: list[tuple[Count, list[Number]]] = []


class _SpeculationSettings(Table):
    algorithm: str
    draft_tokens: Any = None
    simulate_accept_length: Amount | None = None
    simulate_accept: _Profile | None = None


class Config(Table):
    model: str
    device: str
    dtype: str
    load_format: str
    fp8_activations: Flag = None
    deterministic: Flag = None
    server: str = ""
    speculation: _SpeculationSettings
    graphs: _GraphModes
    prefix_cache: Flag


class Caps(Table):
    """A point that failed has none."""

    device: str = ""
    dtype: str = ""
    fp8_activations: str = ""
    deterministic: str = ""
    max_running: Count = 0
    max_model_len: Count = 0
    kv_pages: Count = 0
    page_size: Count = 0
    prefill_chunk: Count = 0
    state_bytes: Amount = 0
    cached_states: Count = 0
    draft_length_s: dict[CountText, dict[str, Amount]] = {}
    verify_budget_s: dict[CountText, dict[str, Amount]] = {}


class _Acceptance(Table):
    drafted: list[Count]
    tried: list[Count]
    accepted: list[Count]
    context: list[Annotated[list[Count], Field(min_length=3, max_length=3)]]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not len(self.drafted) == len(self.tried) == len(self.accepted):
            raise ValueError("drafted, tried and accepted should have one number per position")
        if not all(verifies for _, verifies, _ in self.context):
            raise ValueError("context should have a positive number of verifies in each bucket")
        return self


class _GraphCounts(Table):
    replays: Count


class _ServerAcceptance(Table):
    verifies: Positive
    accepted: list[Count]


class _States(Table):
    kept: Count
    loaded: Count
    evicted: Count


@_with_numbers_of(StepCounters)
class Counters(Table):
    launch_lead_s: Number = 0.0
    acceptance: _Acceptance | None = None
    emitted_histogram: list[Count] = []
    draft_lengths: dict[CountText, dict[str, Positive]] = {}
    draft_lengths_by_context: dict[CountText, dict[CountText, dict[str, Positive]]] = {}
    verify_budgets: dict[CountText, dict[str, Positive]] = {}
    graphs: dict[str, _GraphCounts] = {}
    steps_by_rows: dict[CountText, Annotated[list[Amount], Field(min_length=2, max_length=2)]] = {}
    errors: dict[str, Count] = {}
    states: _States | None = None
    no_accept_length: str = ""
    server_acceptance: _ServerAcceptance | None = None
    resent_requests: Count = 0
    client_cpu_share: Amount | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        given = self.model_fields_set
        if "acceptance" in given and self.acceptance is None:
            raise ValueError("acceptance should be a table")
        if "states" in given and self.states is None:
            raise ValueError("states should be a table")
        drafted = self.acceptance is not None and any(self.acceptance.drafted)
        if drafted and not any(self.emitted_histogram):
            raise ValueError("emitted_histogram should count the verifies that acceptance has")
        if not all(steps for steps, _ in self.steps_by_rows.values()):
            raise ValueError("steps_by_rows should have a positive number of steps for each number of rows")
        for count, times in _GO_TOGETHER.items():
            for seconds in times:
                if getattr(self, count) and seconds not in given:
                    raise ValueError(f"{seconds} should be given with {count}")
        return self


class Workload(Table):
    """What every command writes. A record with a `configuration` is of a point of a sweep."""

    command: str = ""
    error: str | None = None
    section: str = ""
    configuration: str = ""
    concurrency: Positive | None = None
    place: Count = 0
    repeat: Count = 0
    earlier_answers: Count = 0
    remarks: list[str] = []
    warnings: list[str] = []
    request_rate: Amount | None = None


class _Shared(Table):
    groups: Positive
    group_prompts: Positive
    shared_len: Any


class Sampling(Table):
    temperature: Amount
    top_p: Amount = 1.0
    top_k: Count = 0
    min_p: Amount = 0.0
    presence_penalty: Number = 0.0
    frequency_penalty: Number = 0.0
    repetition_penalty: Amount = 1.0
    min_tokens: Count = 0


class PointWorkload(Workload):
    """Of a point of a sweep (`sweeps.workload.description.describe`)."""

    configuration: Annotated[str, Field(min_length=1)]
    concurrency: Positive
    place: Count
    repeat: Positive
    dataset: str
    category: str | None = None
    sampling: Sampling | None = None
    until_precise: Amount | None = None
    slo: dict[Literal["ttft_s", "tpot_s", "e2e_s"], Amount] = {}
    prompts: Count
    distinct_prompts: Count = 0
    input_len: Positive | None = None
    input_range: Range | None = None
    output_len: Positive
    output_range: Range | None = None
    ignore_eos: bool
    rendered: bool = False
    thinking: bool | None = None
    seed: int
    shared: _Shared | None = None
    burst: Count = 1
    sequential: bool = False
    output_sha256: str = ""

    @model_validator(mode="after")
    def _measured(self) -> Self:
        if self.error is None and not self.output_sha256:
            raise ValueError("output_sha256 should be given")
        return self


class BenchWorkload(PointWorkload):
    input_len: Positive


class _Git(Table):
    revision: str
    dirty: bool


class _Provenance(Table):
    command: list[str] = []
    git: _Git | None = None
    environment: dict[str, str] = {}


class _Limits(Table):
    read_bytes_s: Amount | None = None
    gemm_flop_s: Amount | None = None
    error: str = ""


class _GpuState(Table):
    samples: Count
    throttle: dict[str, Amount] = {}


class _Conditions(Table):
    limits: dict[Literal["before", "after"], _Limits] = {}
    gpus: dict[CountText, _GpuState] = {}


class Record(Table):
    """record.json."""

    model_config = ConfigDict(extra="forbid")

    config: Config
    caps: Caps
    metrics: dict[str, Number | None]
    counters: Counters
    workload: Workload
    versions: dict[str, str]
    hardware: dict[str, Any]
    provenance: _Provenance = _Provenance()
    conditions: _Conditions = _Conditions()
    created: str
    schema_: int = Field(alias="schema")

    @field_validator("hardware")
    @classmethod
    def _names(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in ("cpu", "gpu", "driver"):
            if not isinstance(value.get(name, ""), str):
                raise ValueError(f"{name} should be a text")
        return value

    @field_validator("metrics")
    @classmethod
    def _not_negative(cls, value: dict[str, float | None]) -> dict[str, float | None]:
        for name, number in value.items():
            if number is not None and number < 0 and name in METRICS and not METRICS[name].is_signed:
                raise ValueError(f"{name} should not be negative")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.workload.error is None and self.metrics.get("requests") is None:
            raise ValueError("metrics should have the number of requests")
        if missing := sorted(self.counters.draft_lengths.keys() - self.caps.draft_length_s.keys()):
            raise ValueError(f"caps.draft_length_s should have batch bucket {missing[0]} of counters.draft_lengths")
        if missing := sorted(self.counters.verify_budgets.keys() - self.caps.verify_budget_s.keys()):
            raise ValueError(f"caps.verify_budget_s should have batch bucket {missing[0]} of counters.verify_budgets")
        return self


class PointRecord(Record):
    """record.json of a point of a sweep."""

    workload: PointWorkload

    @field_validator("config")
    @classmethod
    def _known(cls, value: Config) -> Config:
        try:
            speculation_of(value.speculation.model_dump(exclude_unset=True))
            Graphs(**value.graphs.model_dump())
        except TypeError as error:
            raise ValueError(f"speculation: {error}") from error
        return value


class BenchRecord(PointRecord):
    """record.json of a point of a bench."""

    workload: BenchWorkload


@_with_numbers_of(RequestMetrics)
class RequestRow(Table):
    """A line of requests.jsonl. Rows of scored texts have no finish reason."""

    index: Count
    finish_reason: str | None = None
    seed: int | None = None
    logprob: Number | None = None
    scored_tokens: Count = 0
    token_ids: list[int] | None = None
    category: str | None = None
    turn: Positive | None = None

    @model_validator(mode="after")
    def _generated(self) -> Self:
        if self.finish_reason is None and "logprob" not in self.model_fields_set:
            raise ValueError("finish_reason should be given")
        return self


class OutputRow(Table):
    """A row of an output of `generate`. That of a prompt that failed has an error in place of an answer."""

    index: Count
    finish_reason: str | None
    error: str | None = None
    token_ids: list[int] | None = None
    accept_length: Amount | None
    verify_steps: Count
