"""Static device tensors that every step reads and writes, and the only ways in which the host writes to them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from specbatch.core.logit_adjustments import ANY, Adjustments
from specbatch.core.sampling import Sampling, SamplingFlags
from specbatch.core.sampling_params import MOST_BAD_WORDS, MOST_BIASES, MOST_WORD_TOKENS
from specbatch.core.token_constraint import Constraint
from specbatch.grammar.token_automaton import FREE
from specbatch.kernels.attention.queries import SharedPrefixes
from specbatch.kernels.common.packed_rows import PackedRows, rows_of_groups
from specbatch.kernels.common.rehearsal import is_rehearsing
from specbatch.kernels.common.upload import upload, upload_to
from specbatch.kernels.elementwise.gather_rows import gather_rows
from specbatch.kernels.sampling.accept import BatchRows
from specbatch.kernels.sampling.verify_inputs import verify_inputs
from specbatch.memory.grammar_pool import CELLS
from specbatch.memory.shared_prefixes import MOST_GROUPS, PrefixGroups

MOST_END_TOKENS = 64  # of a request with `min_tokens`
# Columns of the rows of requests: seed, end_from, prompt and grammar; floats as their bits; end tokens
_INTEGERS, _FLOATS, _ENDS = slice(0, 7), slice(7, 14), slice(14, 14 + MOST_END_TOKENS)


@dataclass(frozen=True)
class Admission:
    """A request that gets a slot: its tokens so far, the pages that hold them and its sampling parameters.

    shared      how many of the pages come from the prefix cache, the first ones
    seed        a signed 64-bit number
    end_tokens  tokens that may not be sampled before position `end_from`, at most `MOST_END_TOKENS`
    prompt      tokens of the prompt, the first of `tokens`
    penalties   presence, frequency and repetition penalty
    bias        biases of tokens, at most `MOST_BIASES`
    banned      spellings of bad words, at most `MOST_BAD_WORDS` of at most `MOST_WORD_TOKENS` tokens
    grammar     where the classes of tokens and the rows of states of its grammar start, and how long a row is (see
                `grammar_mask`); then the state, `FREE` without a grammar
    """

    slot: int
    tokens: list[int]
    pages: list[int]
    shared: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    end_tokens: tuple[int, ...] = ()
    end_from: int = 0
    prompt: int = 0
    penalties: tuple[float, float, float] = (0.0, 0.0, 1.0)
    bias: tuple[tuple[int, float], ...] = ()
    banned: tuple[tuple[int, ...], ...] = ()
    grammar: tuple[int, int, int, int] = (0, 0, 0, FREE)


class DeviceBatch:
    """One row for each slot. Slot 0 is for padding: its pages are page 0 and its length stays 1.

    tokens      int64 [R, W]: prompt and output; the newest token is the root, whose KV is not written yet
    lengths     int64 [R]: KV length, which is the position of the root, and while a prompt is computed that of its next
                chunk, 0 before the first. The host only knows bounds of it
    page_table  int64 [R, P]: the page of each page_size tokens
    """

    def __init__(self, slots: int, width: int, pages: int, device: torch.device) -> None:
        self.device = device
        self.slots = slots
        self.width = width
        self.tokens = torch.zeros(slots + 1, width, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(slots + 1, dtype=torch.int64, device=device)
        self.lengths[0] = 1
        self.page_table = torch.zeros(slots + 1, pages, dtype=torch.int64, device=device)
        # Parameters of requests, in one tensor: each separate write would delay the first token.
        self._rows = torch.zeros(slots + 1, _ENDS.stop, dtype=torch.int64, device=device)
        self._seeds, self._end_from, self._prompts, *_, self._states = self._rows[:, _INTEGERS].unbind(1)
        self._grammars, self._end_tokens = self._rows[:, 3:6], self._rows[:, _ENDS]
        # temperature, k, p, min p; presence, frequency and repetition penalty
        self._parameters = self._rows[:, _FLOATS].view(torch.float64)
        self._states.fill_(FREE)
        self._parameters[:, 6] = 1
        self._bias_tokens = torch.zeros(slots + 1, MOST_BIASES, dtype=torch.int64, device=device)
        self._biases = torch.zeros(slots + 1, MOST_BIASES, dtype=torch.float32, device=device)
        shape = slots + 1, MOST_BAD_WORDS, MOST_WORD_TOKENS
        self._banned = torch.full(shape, ANY, dtype=torch.int64, device=device)
        # Of grammars. It never moves, because graphs hold its address.
        self._tables = torch.empty(CELLS, dtype=torch.int16, device=device)
        shapes = slots, slots, (3, MOST_GROUPS)
        self._prefixes = SharedPrefixes(*(torch.zeros(shape, dtype=torch.int32, device=device) for shape in shapes))
        self._restricted: set[int] = set()  # slots with biases or bad words
        self._filled: dict[int, torch.Tensor] = {}
        self._groups: dict[tuple[int, int, int], PackedRows] = {}

    def admit(self, admissions: list[Admission]) -> None:
        """Write the rows of requests that were given a slot."""
        rows = np.zeros((len(admissions), _ENDS.stop), np.int64)
        rows[:, _INTEGERS] = [(item.seed, item.end_from, item.prompt, *item.grammar) for item in admissions]
        rows[:, _FLOATS].view(np.float64)[:] = [
            (item.temperature, item.top_k, item.top_p, item.min_p, *item.penalties) for item in admissions
        ]
        for row, item in zip(rows[:, _ENDS], admissions, strict=True):
            row[:] = item.end_tokens[0] if item.end_tokens else 0
            row[: len(item.end_tokens)] = item.end_tokens
        # Pages of the last owner may hold NaN, so that all of a slot's are replaced.
        pages = np.zeros((len(admissions), self.page_table.shape[1]), np.int64)
        old: list[torch.Tensor] = []
        new: list[np.ndarray] = []
        for item, row, of_pages in zip(admissions, rows, pages, strict=True):
            slot, count = item.slot, len(item.tokens)
            of_pages[: len(item.pages)] = item.pages
            old += self.lengths[slot : slot + 1], self._rows[slot], self.page_table[slot], self.tokens[slot, :count]
            new += np.zeros(1, np.int64), row, of_pages, np.asarray(item.tokens, np.int64)
        uploaded = upload(np.concatenate(new), self.device)
        torch._foreach_copy_(old, uploaded.split([len(part) for part in new]))
        for item in admissions:
            if item.bias or item.banned or item.slot in self._restricted:
                self._restrict(item)

    def _restrict(self, item: Admission) -> None:
        """Write biases and bad words of a slot, over those of its last owner."""
        self._bias_tokens[item.slot] = 0
        self._biases[item.slot] = 0
        self._banned[item.slot] = ANY
        self._restricted.discard(item.slot)
        if item.bias:
            tokens, values = zip(*item.bias, strict=True)
            self._bias_tokens[item.slot, : len(item.bias)] = upload(tokens, self.device)
            self._biases[item.slot, : len(item.bias)] = upload(values, self.device, torch.float32)
        if item.banned:
            rows = [[*[ANY] * (MOST_WORD_TOKENS - len(word)), *word] for word in item.banned]
            self._banned[item.slot, : len(rows)] = upload(rows, self.device)
        if item.bias or item.banned:
            self._restricted.add(item.slot)

    def load_grammar(self, start: int, cells: np.ndarray) -> None:
        """Write the table of a grammar, int16 cells, to its place among `CELLS`."""
        upload_to(self._tables[start : start + len(cells)], cells)

    def set_states(self, slots: torch.Tensor, states: torch.Tensor) -> None:
        """Write the states int64 [B] of grammars after the roots of slots [B]."""
        self._states[slots] = states

    def filled(self, number: int, slots: torch.Tensor) -> torch.Tensor:
        """int64 [B]: the same number for each of slots [B]. Made once and shared: only read it."""
        if number not in self._filled:
            self._filled[number] = torch.full((self.slots + 1,), number, dtype=torch.int64, device=self.device)
        return self._filled[number][: len(slots)]

    def groups(self, first: int, others: int, most: int) -> PackedRows:
        """`rows_of_groups`. Made once and shared."""
        found = self._groups.get((first, others, most))
        if found is None:
            found = rows_of_groups(first, others, most, self.device)
            if not is_rehearsing():  # there they have no values
                self._groups[first, others, most] = found
        return found

    def place(self, count: int, length: int, pages: int, vocabulary: int) -> None:
        """For measurements, while no request has a slot: give slots 1..count contexts of so many tokens with different
        newest tokens of the vocabulary, and `pages` pages of their own. With 0, as they were."""
        self.lengths[1:] = 0
        self.page_table[1:] = 0
        if count:
            own = torch.arange(count * pages, device=self.device).view(count, pages)
            self.page_table[1 : count + 1, :pages] = own + 1
            self.lengths[1 : count + 1] = length
            self.tokens[1 : count + 1, length] = torch.arange(count, device=self.device) % min(vocabulary, 128)

    def add_pages(self, pages: list[tuple[int, int, int]]) -> None:
        """Extend page rows: (slot, index in its row, page) each."""
        if pages:
            slot, index, page = upload(pages, self.device).unbind(1)
            self.page_table[slot, index] = page

    def share_prefixes(self, found: PrefixGroups) -> None:
        """Write the groups of the next steps, whose requests are in the order of `found`."""
        lengths, members, groups = self._prefixes
        lengths.zero_()  # of padding
        for part, values in ((lengths, found.lengths), (members, found.members)):
            upload_to(part[: len(values)], values)
        upload_to(groups, found.groups)

    def shared_prefixes(self, count: int) -> SharedPrefixes:
        """Of a step over `count` requests, at fixed addresses."""
        return self._prefixes._replace(lengths=self._prefixes.lengths[:count])

    def look_up(self, slots: torch.Tensor, flags: SamplingFlags) -> tuple[torch.Tensor, Sampling]:
        """KV lengths [B] and sampling parameters of slots [B]."""
        lengths, seeds = gather_rows(self.lengths, self._seeds, slots)
        return lengths, self._sampling(slots, seeds, flags)

    def sampling(self, slots: torch.Tensor, flags: SamplingFlags) -> Sampling:
        """Sampling parameters of slots [B]."""
        return self._sampling(slots, self._seeds[slots], flags)

    def _sampling(self, slots: torch.Tensor, seeds: torch.Tensor, flags: SamplingFlags) -> Sampling:
        # Greedy passes need the seeds at most.
        values = self._parameters[slots] if flags.sampled else self._parameters[:0]
        return Sampling(
            temperature=values[:, 0].float(),
            top_k=values[:, 1].long(),
            top_p=values[:, 2].float(),
            min_p=values[:, 3].float(),
            seeds=seeds,
            flags=flags,
            end_tokens=self._end_tokens[slots] if flags.min_tokens else None,
            end_from=self._end_from[slots] if flags.min_tokens else None,
            adjustments=self._adjustments(slots, flags) if flags.adjusts else None,
        )

    def _adjustments(self, slots: torch.Tensor, flags: SamplingFlags) -> Adjustments:
        return Adjustments(
            self._bias_tokens[slots] if flags.biased else None,
            self._biases[slots] if flags.biased else None,
            self._parameters[slots, 4:].float() if flags.penalized else None,
            self._prompts[slots],
            self._banned[slots] if flags.banned else None,
            Constraint(self._tables, self._grammars[slots], self._states[slots]) if flags.constrained else None,
        )

    def stage(
        self, slots: torch.Tensor, drafts: torch.Tensor, ancestors: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and positions, int64 [B * N], of a verify of drafts [B, N - 1] after the roots of slots [B].

        ancestors int64 [B, N]: of a tree; None for a chain."""
        return verify_inputs(self.tokens, self.lengths, slots, drafts, ancestors)

    def rows(self, slots: torch.Tensor) -> BatchRows:
        """What a step over slots [B] writes its tokens to."""
        return BatchRows(self.tokens, self.lengths, slots)
