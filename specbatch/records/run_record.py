"""The record of a run: settings, resources, numbers, hardware and versions, as `record.json` and `requests.jsonl`."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from specbatch.algorithms import NO_SPECULATION
from specbatch.config.acceptance_profile import AcceptanceProfile, whole_lengths
from specbatch.config.draft_shape import AUTO, MOST
from specbatch.config.speculation import Speculation
from specbatch.files.atomic_file import write_atomic
from specbatch.records.environment import hardware, versions
from specbatch.records.provenance import provenance

SCHEMA = 1
REQUESTS = "requests.jsonl"
# Capacities of an engine that headings show.
CAPS = ("max_running", "max_model_len", "kv_pages", "page_size", "prefill_chunk", "state_bytes", "cached_states")


@dataclass
class RunRecord:
    """Everything needed to make a table again or to repeat the run. The command fills in `workload`.

    docs/records.md has what is written beside the fields.
    """

    config: Annotated[dict[str, Any], "settings of the engine, as they were resolved"]
    caps: Annotated[
        dict[str, Any],
        "what the engine could hold after the memory plan, and its device, dtype and backends; of a server "
        "`server_version`, if it tells",
    ]
    metrics: Annotated[dict[str, float | None], "the numbers of the run: the table of metrics below"]
    counters: Annotated[
        dict[str, Any],
        "counts that metrics and tables are computed from: iterations, graph replays, acceptance by draft position and "
        "by context; of a server `errors`, `server_acceptance` (verifies with drafts, and how many accepted each "
        "draft), where the accept length comes from, `resent_requests` and `client_cpu_share`",
    ]
    requests: Annotated[list[dict[str, Any]], "not in the file: the lines of `requests.jsonl`"]
    workload: Annotated[
        dict[str, Any],
        "what was run: the command, the prompts with their hash, lengths, sampling, latency objectives (`slo`), and "
        "the place of a point in its sweep",
    ] = field(default_factory=dict)
    versions: Annotated[dict[str, str], "of specbatch, Python, PyTorch, Triton and other packages"] = field(
        default_factory=lambda: versions()
    )
    hardware: Annotated[
        dict[str, Any],
        "CPU, cores and memory; on a GPU its name, `gpu_id` (from its UUID, which tells two GPUs of one name apart), "
        "memory, CUDA version (`cuda`) and NVIDIA driver (`driver`)",
    ] = field(default_factory=lambda: hardware())
    provenance: Annotated[
        dict[str, Any],
        "how the run was started: `command`, the arguments; `git`, the revision of specbatch and whether its checkout "
        "was changed (`dirty`), absent where it is unknown; `environment`, the variables {variables} that were set. "
        "Values of options and variables with names such as `--api-key`, and user, password and query of URLs, are "
        "never kept, nor are the arguments of a program that calls `Engine` itself. Earlier versions did not record it",
    ] = field(default_factory=lambda: provenance())
    conditions: Annotated[
        dict[str, Any],
        "of a point on a GPU: `limits`, its read bandwidth and GEMM rate `before` and `after` the point; `gpus`, of "
        "each least, median and highest clock, power and temperature during it, and the share of `samples` with each "
        "reason for lower clocks (`throttle`). Earlier versions did not record it",
    ] = field(default_factory=dict)
    created: Annotated[str, "when the run ended (ISO 8601, UTC)"] = field(
        default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds")
    )
    schema: Annotated[int, "version of this format"] = SCHEMA

    @property
    def gpu(self) -> str | None:
        """The GPU of the run; None for a run on a CPU, even if the machine has a GPU."""
        on_cpu = self.caps.get("device", self.config.get("device")) == "cpu"
        return None if on_cpu else self.hardware.get("gpu")

    @property
    def gpu_id(self) -> str | None:
        """Of the GPU of the run; None where it is unknown."""
        return None if self.gpu is None else self.hardware.get("gpu_id")

    @property
    def processor(self) -> str:
        """The GPUs of the run, or the CPU with its number of cores."""
        if self.gpu is None:
            return f"{self.hardware.get('cpu')}, {self.hardware.get('cores')} cores"
        count = self.config.get("tensor_parallel", 1) * self.replicas
        return self.gpu if count == 1 else f"{count} x {self.gpu}"

    @property
    def command(self) -> str:
        """The command of the run, ready for a shell; "" where it was not recorded or is a program of the user."""
        return shlex.join(self.provenance.get("command", []))

    @property
    def revision(self) -> str | None:
        """The git revision of specbatch, with "-dirty" if files were changed; None if unknown."""
        git = self.provenance.get("git")
        return None if git is None else f"{git['revision']}{'-dirty' if git['dirty'] else ''}"

    @property
    def replicas(self) -> int:
        """How many of them ran the requests; 1 for a record of an earlier version."""
        return int(self.config.get("data_parallel", 1))

    @property
    def is_deterministic(self) -> bool:
        """Whether no bit of an answer depended on drafts and batches; see `EngineConfig.deterministic`."""
        return self.caps.get("deterministic") == "on"

    @property
    def other_engine(self) -> str | None:
        """The engine of a run of which only the answers are known (`specbatch.records.lm_eval_results`); None for a run
        of this package."""
        name: str | None = self.config.get("engine")
        return name

    @property
    def of_server(self) -> bool:
        """Whether the answers are those of a server over HTTP."""
        return "server" in self.config

    @property
    def error(self) -> str | None:
        """Why nothing was measured; None if it was. Some failed requests are no such reason, all of them are."""
        if (known := self.workload.get("error")) is not None or self.metrics.get("requests"):
            return None if known is None else str(known)
        reasons = "; ".join(f"{error} ({count})" for error, count in self.counters.get("errors", {}).items())
        return f"every request failed: {reasons}" if reasons else None

    @property
    def drafts(self) -> bool:
        """Whether the run used speculation."""
        return bool(self.config["speculation"]["algorithm"] != NO_SPECULATION)

    @property
    def speculation(self) -> Speculation:
        return speculation_of(self.config["speculation"])

    @property
    def chooses_draft_length(self) -> bool:
        """Whether the number of drafted or verified tokens was chosen during the run."""
        asked = self.config["speculation"]
        return AUTO in (asked.get("draft_tokens"), asked.get("verify_budget"))

    @property
    def simulated_accept_length(self) -> float | None:
        """The mean of simulated accept lengths with all drafts; None if acceptance was real."""
        asked = self.config["speculation"]
        if asked.get("simulate_accept") is not None and (profile := self.speculation.simulated) is not None:
            return profile.accept_length()
        mean: float | None = asked.get("simulate_accept_length")
        return mean

    @property
    def simulated_acceptance(self) -> str | None:
        """The model of simulated acceptance, as tables name it; None if acceptance was real."""
        return None if self.simulated_accept_length is None else str(self.speculation.simulated)

    def graphs(self, kind: str) -> dict[str, dict[str, Any]]:
        """Counters of CUDA graphs by name, empty where graphs of this kind were off.

        kind: decode, prefill (of target and draft), target_prefill or draft_prefill.
        """
        if self.config["graphs"][kind.rpartition("_")[2]] == "off":
            return {}
        return {name: graph for name, graph in self.counters.get("graphs", {}).items() if name.endswith(kind)}

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def summary(self) -> str:
        """The record as JSON, without the rows of requests."""
        body = self.as_dict()
        del body["requests"]
        return json.dumps(body, indent=2) + "\n"

    def save(self, folder: Path) -> None:
        """Write `record.json` (without the rows) and `requests.jsonl` into `folder`, each atomically."""
        write_atomic(folder / REQUESTS, "".join(json.dumps(row) + "\n" for row in self.requests))
        write_atomic(folder / "record.json", self.summary())


def speculation_of(settings: dict[str, Any]) -> Speculation:
    """The settings of a record, in which tuples are lists."""
    known: dict[str, Any] = {name: tuple(item) if isinstance(item, list) else item for name, item in settings.items()}
    mean = known.get("simulate_accept_length")
    if mean is not None and "simulate_accept" not in known:  # of an earlier version
        known |= {"simulate_accept_length": None, "simulate_accept": whole_lengths(mean, MOST)}
    elif isinstance(profile := known.get("simulate_accept"), dict):
        curve = tuple((drafted, length) for drafted, length in profile.get("curve", ()))
        by_context = tuple((length, tuple(p)) for length, p in profile.get("by_context", ()))
        known["simulate_accept"] = AcceptanceProfile(profile["name"], tuple(profile["conditional"]), curve, by_context)
    return Speculation(**known)
