"""The device side of an engine: one method for each thing that the host launches, with plain data as arguments.

Arguments are integers, lists, NumPy arrays and frozen dataclasses of them, which can be pickled. The same calls
replayed in the same order on an identically built worker leave the same tensors: that is how several processes run one
engine.
"""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch

from specbatch.core.attention_metadata import PromptChunk
from specbatch.core.device_batch import Admission, DeviceBatch
from specbatch.core.sampling import SamplingFlags
from specbatch.core.step_input import StepInput
from specbatch.drafters.corpus import Answer, Corpus
from specbatch.engine.device.host_masks import AskedHost, Drafts, MaskUpload, StepInParts
from specbatch.engine.device.prefill import Prefilled, PrefillStep, PrefillWork
from specbatch.engine.device.rank_calls import ANSWER, OtherRanks, launches
from specbatch.engine.device.score_step import ScoreStep, ScoreWork
from specbatch.engine.device.step import DecodeStep
from specbatch.engine.device.token_check import TokenCheck
from specbatch.kernels.common.upload import upload
from specbatch.kernels.dispatch import use_deterministic
from specbatch.kernels.gemm.quantized.fp8_activations import use_fp8_activations
from specbatch.memory.kv_cache import KVCache
from specbatch.memory.shared_prefixes import PrefixGroups
from specbatch.progress.bars import Report
from specbatch.runtime.cuda_graphs import (
    GraphCounters,
    Program,
    Recorder,
    Recordings,
    Result,
    WholeGraphs,
    token_buckets,
)
from specbatch.runtime.prefill_forward import PromptWork

if TYPE_CHECKING:
    from specbatch.runtime.parallel_compilation import Compiled


class DeviceWorker:
    """Owns the batch, the models' steps and their CUDA graphs. Results are device tensors. Nothing waits but `propose`,
    if grammars are matched on the host, which is `host`."""

    def __init__(
        self,
        batch: DeviceBatch,
        prefill_step: PrefillStep,
        decode_step: DecodeStep,
        score_step: ScoreStep,
        *,
        caches: list[KVCache],
        forwards: dict[str, PromptWork],
        page_size: int,
        prefill_chunk: int,
        recorded_tokens: int,
        draft_lengths: tuple[int, ...],
        budgets: tuple[float, ...] = (),
        recorder: Recorder | None,
        fp8: bool,
        deterministic: bool = False,
        may_share: bool = False,
        token_check: TokenCheck | None = None,
        corpus: Corpus | None = None,
        fewest: int | None = None,
    ) -> None:
        """caches: of target and draft; forwards: their prefill passes by role, for their counters and recordings;
        prefill_chunk: most tokens of a pass; recorded_tokens: most of one that is recorded; draft_lengths: numbers of
        drafts that a step may have; budgets: see `Speculation`; recorder: for graphs of whole decode steps, None to run
        them eagerly; fp8, deterministic: see `use_fp8_activations` and `use_deterministic`; may_share: whether
        `share_prefixes` is called; token_check: of a model that is divided over ranks; corpus: that the drafter reads;
        fewest: see `WholeGraphs`."""
        self.others: OtherRanks | None = None
        self.batch = batch
        self.prefill_step = prefill_step
        self.decode_step = decode_step
        self.score_step = score_step
        self.caches = caches
        self.forwards = forwards
        self._page_size = page_size
        self._prefill_chunk = prefill_chunk
        self.recorded_tokens = recorded_tokens
        self._fp8 = fp8
        self.deterministic = deterministic
        self.token_check = token_check
        self.corpus = corpus
        self._shares = False  # whether requests of the next steps share prefixes
        self.host = AskedHost(batch.device)
        self.decode_counters = GraphCounters()
        self.graphs: WholeGraphs | None = None
        if recorder is not None:
            self.graphs = WholeGraphs(
                self._run, recorder, batch.slots, draft_lengths, batch.device, fewest, budgets, may_share=may_share
            )
            self.decode_counters = self.graphs.counters
        self._parts = StepInParts(decode_step, self.decode_counters)
        if recorder is not None:
            self._parts.record(recorder, lambda slots, count: self._input(slots, SamplingFlags(), count), batch.slots)

    @property
    def rank(self) -> int | None:
        """Of this process, where it leads others."""
        return None if self.others is None else 0

    def lead(self, others: OtherRanks) -> None:
        """Have the other ranks make all calls from now on."""
        self.others = others
        self.host.tell = lambda answer: others.send(ANSWER, (answer,))
        if self.token_check is not None:
            self.token_check.report = others.report

    @launches
    def admit(self, admissions: list[Admission]) -> None:
        """Write tokens, pages and sampling parameters of requests that were given a slot."""
        self._clear([page for item in admissions for page in item.pages[item.shared :]])
        self.batch.admit(admissions)
        self.decode_step.admit([item.slot for item in admissions])

    @launches
    def load_grammar(self, start: int, cells: np.ndarray) -> None:
        """Write the table of a grammar to its place; see `DeviceBatch.load_grammar`."""
        self.batch.load_grammar(start, cells)

    @launches
    def add_pages(self, pages: list[tuple[int, int, int]]) -> None:
        """Extend page rows: (slot, index in its row, page) each."""
        self._clear([page for _, _, page in pages])
        self.batch.add_pages(pages)

    @launches
    def share_prefixes(self, found: PrefixGroups | None) -> None:
        """What the requests of the next steps share, in the order of their slots; None: nothing that pays."""
        self._shares = False  # should writing fail
        if found is not None:
            self.batch.share_prefixes(found)
            self._shares = True

    @launches
    def prefill(self, work: PrefillWork) -> Prefilled:
        """Run one prefill pass; see `PrefillStep`."""
        return self.prefill_step(work)

    @launches
    def decode(
        self,
        slots: list[int],
        flags: SamplingFlags,
        num_drafts: int,
        bound: int,
        drafting: int | None = None,
        budget: float | None = None,
    ) -> Result:
        """Run one decode step over the requests in `slots`, of which the first `drafting` draft (None: all), from a
        graph if there are any; see `DecodeStep`. No KV is longer than `bound` after it. budget: see `StepInput`."""
        if self.graphs is not None:
            result = self.graphs(slots, flags, num_drafts, drafting, budget, shares=self._shares)
        else:
            self.decode_counters.fall_back("off")
            on_device = upload(slots, self.batch.device)
            result = self._run(on_device, flags, num_drafts, drafting, budget, self._shares, bound)
        if self.token_check is not None:
            self.token_check.step()
        return result

    @launches
    def propose(
        self, slots: list[int], flags: SamplingFlags, num_drafts: int, bound: int, budget: float | None = None
    ) -> Drafts:
        """Begin a decode step that waits for masks of grammars on the host: draft. `verify` and `accept` follow."""
        with use_fp8_activations(self._fp8):
            step = self._input(upload(slots, self.batch.device), flags, num_drafts, self._shares, bound, budget)
            return self._parts.propose(step, self.host)

    @launches
    def verify(self) -> None:
        """Run the target over what `propose` has drafted, which needs no mask."""
        with use_fp8_activations(self._fp8):
            self._parts.verify()

    @launches
    def accept(self, masks: MaskUpload) -> Result:
        """End the step: accept drafts and choose tokens as `masks` allow."""
        with use_fp8_activations(self._fp8):
            result = self._parts.accept(masks)
        if self.token_check is not None:
            self.token_check.step()
        return result

    def confirm(self) -> None:
        """Wait until it is known that all ranks have chosen the same tokens. Raises SpecbatchError if they have not."""
        if self.others is not None:
            self.report_digests()
            self.others.wait_until_compared()

    @launches
    def report_digests(self) -> None:
        """Report the digests of all steps so far."""
        if self.token_check is not None:
            self.token_check.flush()

    @launches
    def shorten(self, slots: list[int], num_drafts: int, bound: int) -> None:
        """Prepare the drafter for a step with fewer drafts than the previous one."""
        with use_fp8_activations(self._fp8):
            step = self._input(upload(slots, self.batch.device), SamplingFlags(), num_drafts, False, bound)
            self.decode_step.drafter.shorten(step)

    @launches
    def catch_up(self, chunks: list[PromptChunk], most: int) -> None:
        """Update the draft state for tokens that were computed without it, up to `most` tokens a pass."""
        self.prefill_step.catch_up(chunks, most)

    @launches
    def place(self, count: int, length: int, pages: int) -> None:
        """Contexts for measurements, after which nothing is known of acceptance; see `DeviceBatch.place`."""
        self.decode_step.forget()
        self.batch.place(count, length, pages, self.decode_step.model.config.vocab_size)

    @launches
    def add_answers(self, answers: list[Answer]) -> None:
        """Add finished answers to the corpus."""
        assert self.corpus is not None
        self.corpus.add(answers)

    @launches
    def forget_answers(self) -> None:
        """Reduce the corpus to the answers of its files."""
        assert self.corpus is not None
        self.corpus.forget()

    @launches
    def assign_pages(self, table: np.ndarray) -> None:
        """Replace the page rows of slots 1, 2, ... by table int64 [n, P], for `score`."""
        self.batch.page_table[1 : 1 + len(table)] = upload(table, self.batch.device)

    @launches
    def score(self, work: ScoreWork) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Log-probabilities of given tokens; see `ScoreStep`."""
        return self.score_step(work)

    def _clear(self, pages: list[int]) -> None:
        for cache in self.caches:
            cache.clear(pages)

    def _run(
        self,
        slots: torch.Tensor,
        flags: SamplingFlags,
        num_drafts: int,
        drafting: int | None,
        budget: float | None,
        shares: bool,
        bound: int | None = None,
    ) -> Result:
        """One decode step over slots [B]; what a graph records."""
        with use_fp8_activations(self._fp8):
            step = self._input(slots, flags, num_drafts, shares, bound, budget)
            if drafting is None:
                return self.decode_step(step)
            # What requests share is known by their places in the whole batch, which one pass verifies.
            drafts = self._input(slots[:drafting], flags, num_drafts, False, bound)
            return self.decode_step.split(step, drafts, self._input(slots[drafting:], flags, 0, False, bound))

    def _input(
        self,
        slots: torch.Tensor,
        flags: SamplingFlags,
        num_drafts: int,
        shares: bool = False,
        bound: int | None = None,
        budget: float | None = None,
    ) -> StepInput:
        """bound: see `decode`; None for any, as in a graph."""
        bound = self.batch.width - 1 if bound is None else bound
        lengths, sampling = self.batch.look_up(slots, flags)
        return StepInput(
            self.batch,
            slots,
            lengths,
            num_drafts,
            self._page_size,
            bound,
            sampling,
            prefixes=self.batch.shared_prefixes(len(slots)) if shares else None,
            budget=budget,
        )

    # -- graphs -----------------------------------------------------------------------------------------------

    def recordings(self) -> list[Recordings]:
        """Everything that is recorded before work begins."""
        found: list[Recordings] = [item for item in self.forwards.values() if isinstance(item, Recordings)]
        return found if self.graphs is None else [*found, self.graphs]

    @torch.inference_mode()
    def compile_kernels(self, report: Report) -> Compiled | None:
        """Compile the kernels of `record_graphs` in parallel, unless Triton's cache has them. On a CPU there are none,
        and Triton may be missing."""
        recordings = self.recordings()
        if self.batch.device.type != "cuda" or not recordings:
            return None
        from specbatch.runtime.parallel_compilation import compile_ahead

        with use_fp8_activations(self._fp8), use_deterministic(self.deterministic):
            found = compile_ahead([item.capture() for item in recordings], self.warm_ups(), report)
        torch.cuda.empty_cache()  # recordings warm up on another stream
        return found

    @torch.inference_mode()
    def record_graphs(self, report: Report) -> int:
        """Run what is not recorded once, so that it is ready, then record every bucket. Returns how many buckets."""
        recordings = self.recordings()
        with use_deterministic(self.deterministic):
            for program in self.warm_ups():
                program()
        if self.batch.device.type == "cuda":
            torch.cuda.empty_cache()
        total = sum(len(item) for item in recordings)
        report(0, total)
        with use_fp8_activations(self._fp8), use_deterministic(self.deterministic):
            for done, _ in enumerate(chain.from_iterable(item.capture() for item in recordings), start=1):
                report(done, total)
        if self.batch.device.type == "cuda":
            torch.cuda.synchronize(self.batch.device)
            torch.cuda.empty_cache()  # what warming up took on the recorder's stream, where nothing else can use it
        return sum(len(item) for item in recordings)

    @property
    def has_graphs(self) -> bool:
        return any(map(len, self.recordings()))

    @launches
    def drop_graphs(self) -> None:
        """Free all recordings; everything runs eagerly from now on."""
        for item in self.recordings():
            item.drop()
        self.graphs = self._parts.graphs = None

    def warm_ups(self) -> list[Program]:
        """Prefill passes that compile whatever runs between the segments, which are not recorded yet: it has the static
        tensors as inputs, whose values do not matter."""
        if not any(isinstance(item, Recordings) for item in self.forwards.values()):
            return []
        warm_up, sizes = self.prefill_step.warm_up, token_buckets(self.recorded_tokens)
        if self._prefill_chunk > sizes[-1]:  # without graphs; Triton tells multiples of 16 from other numbers
            sizes += [self._prefill_chunk, self._prefill_chunk - 1]
        passes: list[Program] = [partial(warm_up, size) for size in sizes]
        # Other kernels read the keys of a prefix; of a long one, several programs share them.
        passes += [partial(warm_up, sizes[0], prefix) for prefix in (1, self.batch.width)]
        # After the last attention a pass has as many rows as prompts end in it, and Triton compiles its GEMMs for 1
        # row, for 16 and for the numbers between.
        return passes + [partial(warm_up, sizes[0], ends=n) for n in (2, 16) if n <= self.batch.slots]

    def close(self) -> None:
        """Drop the graphs, which refer to this worker, so that its memory is freed at once."""
        self.graphs = self._parts.graphs = None
