"""Messages between a data-parallel engine and its replicas. All of them can be pickled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specbatch.config.engine_config import EngineConfig
from specbatch.core.completion import Completion
from specbatch.engine.requests.submissions import Submission
from specbatch.errors import SpecbatchError
from specbatch.memory.planner import MemoryShare


@dataclass(frozen=True)
class Build:
    """Build an engine. weights_of: the number of one whose weights it uses. Answered by `Built` or `Refused`."""

    engine: int
    config: EngineConfig
    share: MemoryShare
    weights_of: int | None


@dataclass(frozen=True)
class Close:
    """Close an engine."""

    engine: int


@dataclass(frozen=True)
class Begin:
    """Open a stream of an engine. Streams run one after the other."""

    stream: int
    engine: int


@dataclass(frozen=True)
class Submit:
    """Prompts of a stream, each with the seconds that it has waited. Answered by `Completed`, in any order."""

    stream: int
    items: list[tuple[Submission, float]]


@dataclass(frozen=True)
class Abort:
    """Abort the prompt with this index or request id."""

    stream: int
    name: int | str


@dataclass(frozen=True)
class End:
    """The stream gets no other prompts. drop: what is unfinished is dropped."""

    stream: int
    drop: bool


@dataclass(frozen=True)
class Call:
    """Call a method of an engine while no stream is open. Answered by `Returned` or `Refused`."""

    ticket: int
    engine: int
    method: str
    arguments: dict[str, Any]


Command = Build | Close | Begin | Submit | Abort | End | Call


@dataclass(frozen=True)
class Log:
    """A line of the log of an engine."""

    engine: int
    line: str


@dataclass(frozen=True)
class Shrunk:
    """An engine goes on with a smaller batch after a lack of memory. line: says so."""

    engine: int
    line: str


@dataclass(frozen=True)
class Output:
    """A line that the process of a replica has printed."""

    line: str


@dataclass(frozen=True)
class Alive:
    """The stream, or the call, goes on. Sent every few seconds while it does."""


@dataclass(frozen=True)
class Progress:
    """Of recording the graphs of an engine."""

    done: int
    total: int


@dataclass(frozen=True)
class Built:
    """config, caps: of the engine."""

    engine: int
    config: EngineConfig
    caps: dict[str, Any]


@dataclass(frozen=True)
class Completed:
    """completion: without the tokens of its prompt."""

    stream: int
    completion: Completion


@dataclass(frozen=True)
class Returned:
    ticket: int
    value: Any


@dataclass(frozen=True)
class Refused:
    """The `Build` of an engine, or the `Call` with a ticket, raised SpecbatchError. The replica goes on."""

    error: SpecbatchError
    engine: int
    ticket: int | None = None


@dataclass(frozen=True)
class Ended:
    """The replica has ended or cannot go on. It is the last message.

    details   a traceback
    lost      its process or node was ended from outside, so that another one may fare better
    smaller   after a lack of memory, settings with which its successor needs less
    """

    reason: str
    details: str = ""
    lost: bool = False
    smaller: Mapping[str, int] = field(default_factory=dict)


Message = Log | Shrunk | Output | Alive | Progress | Built | Completed | Returned | Refused | Ended
