"""CUDA graphs of whole decode steps, and what they share with those of prefill passes (`prefill_forward.py`).

A graph is a recording of kernel launches with their addresses: its inputs and outputs are static tensors, and sizes
that change are read from the device. A batch is therefore padded to the next recorded bucket.
"""

from __future__ import annotations

import gc
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from specbatch.config.engine_config import Graphs
from specbatch.core.sampling import SamplingFlags
from specbatch.core.sampling_params import MOST_TOP_LOGPROBS
from specbatch.kernels.common.rehearsal import is_rehearsing, rehearse
from specbatch.kernels.elementwise.gather_rows import ring_push
from specbatch.runtime.device import is_out_of_memory

Program = Callable[[], None]
# Results that may be in flight at the same time: one being computed, one being copied, one being read.
RING = 4
SHORT_TOKENS = 2048  # prefill passes of up to so many are recorded as a whole, too, with and without a prefix
LONG_TOKENS = 8192  # passes of more are not recorded in any case
LAYER_WORK = 0.6e12  # operations of a layer: 1 ms on an H200, where the host launches a layer in 0.7 ms


class Result(NamedTuple):
    """What a pass returns of B requests.

    packed        int64 [B, N + 3] of a decode step with N nodes (see `Accepted.packed`), [B, 2] of a prefill pass
    logprobs      float32 [B, N]: of the tokens, if asked for
    top_logprobs  float32 [B, N, K]: of the most likely tokens, if asked for
    top_tokens    int64 [B, N, K]
    values        float32 [B, N - 1]: see `Proposal`
    """

    packed: torch.Tensor
    logprobs: torch.Tensor | None = None
    top_logprobs: torch.Tensor | None = None
    top_tokens: torch.Tensor | None = None
    values: torch.Tensor | None = None

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What there is, in this order."""
        return tuple(item for item in self if item is not None)


@dataclass
class GraphCounters:
    """Replays, eager fallbacks by reason, and padding."""

    replays: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)
    padded: int = 0  # computed requests or tokens that are padding
    recorded_late: int = 0  # recordings made while requests wait

    def reset(self) -> None:
        self.replays = self.padded = self.recorded_late = 0
        self.fallbacks.clear()

    def fall_back(self, reason: str) -> None:
        self.fallbacks[reason] = self.fallbacks.get(reason, 0) + 1


class Recorder:
    """Records programs into CUDA graphs that share one memory pool.

    They may share it because each leaves its results in tensors made outside, and all replay on one stream. In a
    rehearsal (see `parallel_compilation`) programs run on the host only, and what is recorded does nothing.
    """

    def __init__(self, device: torch.device, *, may_leave_out: bool = True) -> None:
        """may_leave_out: without enough memory, what takes most of it is left out; ranks all record the same."""
        self._may_leave_out = may_leave_out
        self._take_pool()
        self._stream = torch.cuda.Stream(device)

    def _take_pool(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def warm(self, program: Program) -> None:
        """Run once, for what is compiled or allocated on first use."""
        if is_rehearsing():
            rehearse(program)
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            program()
        torch.cuda.current_stream().wait_stream(self._stream)

    def record_each(
        self, buckets: list[int], record: Callable[[int], None], forget: Program, left_out: list[int]
    ) -> Iterator[None]:
        """Record every bucket, the largest first: the others fit into the memory it leaves. Without enough memory it
        begins again with half of the largest, and moves those above from `buckets` to `left_out`.

        forget: drops all recordings of these buckets. Raises torch.OutOfMemoryError if not even the smallest fits."""
        waiting = buckets.copy()
        while waiting:
            if self._fits(record, waiting[-1]):
                waiting.pop()
                yield
                continue
            forget()
            count = bisect_right(buckets, buckets[-1] // 2)
            if not count:
                raise torch.OutOfMemoryError(f"no memory for a graph of {buckets[-1]} requests or tokens")
            left_out += buckets[count:]
            del buckets[count:]
            waiting = buckets.copy()
            torch.cuda.empty_cache()
            self._take_pool()  # the one of before is gone if no graph holds it

    def _fits(self, record: Callable[[int], None], bucket: int) -> bool:
        """Record a bucket if there is enough memory. When this returns, no frame of an error holds tensors."""
        try:
            record(bucket)
        except RuntimeError as error:
            if not self._may_leave_out or not is_out_of_memory(error):
                raise
            return False
        return True

    def record(self, program: Program) -> Program:
        """Record what `program` launches; returns its replay. `torch.cuda.graph` would collect garbage at every
        entry."""
        if is_rehearsing():
            return nothing
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), _no_collection():
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                program()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        replay: Program = graph.replay
        return replay


def nothing() -> None:
    """What replays a program that is not recorded yet."""


@contextmanager
def _no_collection() -> Iterator[None]:
    """Disable the garbage collector: destroying a graph of a dropped engine would invalidate the recording."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def graph_bytes(
    graphs: Graphs, *, most: int, chunk: int, layers: int, choices: int = 1, may_share: bool = False
) -> int:
    """Estimated device memory of the recordings themselves: about 64 KiB a graph for its launches.

    choices: numbers of drafts or budgets that a step may have; may_share: see `WholeGraphs`."""
    count = len(batch_buckets(most)) * choices * layers // 4 if graphs.decode == "whole" else 0
    count *= 2 if may_share else 1
    if graphs.prefill == "piecewise":
        buckets = token_buckets(chunk)
        count += len(buckets) * (layers + 1) + 2 * sum(size <= SHORT_TOKENS for size in buckets) * layers // 4
    return count << 16


def batch_buckets(most: int) -> list[int]:
    """Recorded batch sizes: 1, 2, 4, 8, then steps of 8, 16 and 32, up to `most`; from 512 on a sixteenth to an eighth.

    A recording takes some 0.08 s at start. A padded row of an 8B model takes up to 15 us on an H200: where a step of
    512 to 1,024 requests takes 15 to 25 ms, 64 rows apart cost 2% on average while a batch drains, and nothing while it
    is full. A job of a thousand steps would have to run on half of them to gain from buckets half as far apart.
    """
    sizes = [1, 2, 4, *range(8, 32, 8), *range(32, 64, 16), *range(64, 512, 32)]
    start = 512
    while start < most:
        sizes += range(start, 2 * start, start // 8)
        start *= 2
    return [size for size in sizes if size < most] + [most]


def recorded_tokens(chunk: int, hidden_size: int, ranks: int = 1) -> int:
    """Tokens of the largest prefill pass that is recorded, of passes of up to `chunk`.

    A recording saves nothing where the device needs longer than the host launches: it takes start-up time, static
    tensors and padding. A layer has about 24 * hidden_size^2 operations per token, divided over `ranks`. On an H200
    passes of an 8B model (4096) are as fast without graphs from 1,024 tokens on, of a 0.6B model (1024) from 8,192.
    """
    most = SHORT_TOKENS
    while most < LONG_TOKENS and most * 24 * hidden_size**2 < LAYER_WORK * ranks:
        most *= 2
    return min(chunk, most)


def token_buckets(most: int) -> list[int]:
    """Recorded numbers of prompt tokens, up to `most`: at most an eighth of a pass of over 1024 is padding."""
    sizes = [16, *range(32, 256, 32), *range(256, 1024, 64), *range(1024, 2048, 128)]
    sizes += [*range(2048, 4096, 256), *range(4096, most, 512)]
    return [size for size in sizes if size < most] + [most]


def bucket_of(sizes: list[int], count: int) -> int:
    """The smallest of `sizes` that holds `count`."""
    return sizes[bisect_left(sizes, count)]


@runtime_checkable
class Recordings(Protocol):
    """Something that is recorded before work begins, bucket by bucket. left_out: buckets without enough memory."""

    left_out: list[int]

    def capture(self) -> Iterator[None]:
        """Record everything; yields once per bucket."""
        ...

    def __len__(self) -> int:
        """How often `capture` yields."""
        ...

    def drop(self) -> None:
        """Free all recordings, and the memory that they use. What they recorded runs eagerly from now on."""


class Form(NamedTuple):
    """What recordings of a batch size differ in: the number of drafts, the number of requests that draft, the first
    ones, None for all, and the budget of rows, see `StepInput`."""

    num_drafts: int
    drafting: int | None = None
    budget: float | None = None


class WholeGraphs:
    """One recording of a whole decode step per batch bucket, number of drafts, number of requests that draft, budget,
    sampling flags, and whether requests share prefixes.

    Greedy steps in which all requests draft are recorded before work begins, and those in which the fewest do; others
    when they are first asked for. So are those that share prefixes, but for the largest batch, which decides how much
    memory they take, and where the number of drafts or a budget is chosen as the engine runs, all but the smallest at
    batches that are no power of two: few jobs need them, and each takes about 30 ms. Their kernels are compiled before.
    """

    def __init__(
        self,
        run: Callable[[torch.Tensor, SamplingFlags, int, int | None, float | None, bool], Result],
        recorder: Recorder,
        most: int,
        draft_lengths: tuple[int, ...],
        device: torch.device,
        fewest: int | None = None,
        budgets: tuple[float, ...] = (),
        *,
        may_share: bool = False,
    ) -> None:
        """run: the decode step over slots [B], with what `Form` says, and with shared prefixes or without; most:
        largest batch; draft_lengths, budgets: see `Speculation`; fewest: requests that draft where only some do, None
        if that does not happen; may_share: whether there may be shared prefixes."""
        self.counters = GraphCounters()
        self._run = run
        self.recorder = recorder
        self.left_out: list[int] = []
        self._buckets = batch_buckets(most)
        # Those of each bucket that are recorded before work begins.
        self._forms: dict[int, list[Form]] = {
            bucket: [
                Form(length, None, budget)
                for length in draft_lengths
                for budget in (budgets if length and budgets else (None,))
            ]
            for bucket in self._buckets
        }
        for bucket, forms in self._forms.items():
            if fewest is not None and fewest < bucket:
                forms.append(Form(draft_lengths[-1], fewest))
        self._may_share = may_share
        self._graphs: dict[tuple[int, Form, SamplingFlags, bool], Program] = {}
        # The place of the last result in the ring. Replays count it on the device, so that the host need not send it.
        self._turn = 0
        self._place = torch.zeros(1, dtype=torch.int64, device=device)
        # The slots. They are sent only when they differ from those of the last step.
        self._rows = torch.zeros(most, dtype=torch.int64, device=device)
        self._sent: list[int] = []
        self._host = torch.zeros(RING, most, dtype=torch.int64)
        if device.type == "cuda":
            self._host = self._host.pin_memory()
        self._most_nodes = most * (max(draft_lengths) + 1)
        # Rings of results, by field of `Result`. Made when a recording first needs them.
        self._rings: dict[str, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self._buckets)

    @property
    def most(self) -> int:
        """The largest batch."""
        return self._buckets[-1]

    @property
    def recorded(self) -> int:
        """How many recordings there are."""
        return len(self._graphs)

    def drop(self) -> None:
        self._graphs.clear()
        self._rings.clear()

    def capture(self) -> Iterator[None]:
        yield from self.recorder.record_each(self._buckets, self._capture_forms, self._graphs.clear, self.left_out)

    def _capture_forms(self, bucket: int) -> None:
        forms = self._forms[bucket]
        if bucket & (bucket - 1) and bucket < self._buckets[-1] and not is_rehearsing():
            forms = forms[:1]
        for form in reversed(forms):
            if self._may_share and (is_rehearsing() or bucket == self._buckets[-1]):
                self._capture(bucket, form, SamplingFlags(), shares=True)
            self._capture(bucket, form, SamplingFlags())

    def __call__(
        self,
        slots: list[int],
        flags: SamplingFlags,
        num_drafts: int,
        drafting: int | None = None,
        budget: float | None = None,
        *,
        shares: bool = False,
    ) -> Result:
        """One decode step over `slots`, as `Form` says. shares: whether some of them share prefixes."""
        bucket, form = bucket_of(self._buckets, len(slots)), Form(num_drafts, drafting, budget)
        replay = self._graphs.get((bucket, form, flags, shares))
        if replay is None:
            replay = self._capture(bucket, form, flags, shares=shares)
            self.counters.recorded_late += 1
        self._turn = turn = (self._turn + 1) % RING
        rows = [*slots, *[0] * (bucket - len(slots))]
        if rows != self._sent:
            host = self._host[turn, :bucket].copy_(torch.tensor(rows))
            self._rows[:bucket].copy_(host, non_blocking=True)
            self._sent = rows
        replay()
        self.counters.replays += 1
        self.counters.padded += bucket - len(slots)
        return Result(**{name: ring[turn] for name, ring in self._results(len(slots), form, flags).items()})

    def _results(self, count: int, form: Form, flags: SamplingFlags) -> dict[str, torch.Tensor]:
        """Views of the rings for results of `count` requests: [RING, count, ...]."""
        rows = form.num_drafts + 1
        shapes: dict[str, tuple[int, ...]] = {"packed": (count, rows + 3)}
        shapes |= {"logprobs": (count, rows)} if flags.logprobs else {}
        if flags.top_logprobs:
            shapes |= dict.fromkeys(("top_logprobs", "top_tokens"), (count, rows, MOST_TOP_LOGPROBS))
        shapes |= {} if form.budget is None else {"values": (count, form.num_drafts)}
        return {name: self._ring(name)[:, : math.prod(shape)].unflatten(1, shape) for name, shape in shapes.items()}

    def _ring(self, name: str) -> torch.Tensor:
        if name not in self._rings:
            width = {"packed": 4, "logprobs": 1, "values": 1}.get(name, MOST_TOP_LOGPROBS)  # numbers per node, at most
            dtype = torch.int64 if name in ("packed", "top_tokens") else torch.float32
            self._rings[name] = torch.zeros(RING, self._most_nodes * width, dtype=dtype, device=self._rows.device)
        return self._rings[name]

    def _capture(self, bucket: int, form: Form, flags: SamplingFlags, *, shares: bool = False) -> Program:
        rows = self._rows[:bucket]
        rings = self._results(bucket, form, flags)

        def program() -> None:
            result = self._run(rows, flags, *form, shares)
            ring_push(rings["packed"], self._place, result.packed)
            for name, ring in rings.items():
                if name != "packed":
                    ring.index_copy_(0, self._place, getattr(result, name)[None])

        # A step over padding slots is harmless if its result goes to the next place: others may be in flight.
        self._rows.zero_()
        self._sent = []
        try:
            self.recorder.warm(program)
        finally:  # without memory it may have ended before or after it counted the place
            self._place.fill_(self._turn)
        replay = self.recorder.record(program)
        if not is_rehearsing():
            self._graphs[bucket, form, flags, shares] = replay
        return replay
