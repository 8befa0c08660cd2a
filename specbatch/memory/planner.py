"""Computes how many KV pages an engine gets, and its longest request, from free memory, before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from specbatch.config.draft_shape import AUTO
from specbatch.errors import ShortOfMemoryError, SpecbatchError, refuse
from specbatch.memory.capacity import Capacity, choose, most_that_fit, usual_fraction
from specbatch.memory.page_pool import pages_for, reserved_length

if TYPE_CHECKING:
    import torch

    from specbatch.config.engine_config import EngineConfig

# A CPU shares its memory with other processes: without an explicit kv_pages the pool stays below this size.
_CPU_KV_BYTES = 4 << 30
_CACHED_STATES = 64  # cached states of prefixes, or 2 * max_running if that is more and there is room
_CACHED_STATES_SHARE = 8  # cached states take an eighth of the memory for KV, or more of what KV does not need


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes and capacities of an engine. `reasons` says why settings that were "auto" have their values. `kv_pages` is
    the size of the pool; `wanted_pages` is what max_running requests of max_model_len tokens could need.
    `target_page_bytes`: of a page's bytes those of the target, which are in the pool of another engine if this one
    `borrows` it (see `MemoryShare`)."""

    max_running: int
    prefill_chunk: int
    memory_fraction: float
    reasons: dict[str, str]
    available: int
    weights: int
    draft_weights: int
    page_bytes: int
    target_page_bytes: int
    borrows: bool
    kv_pages: int
    wanted_pages: int
    states: int
    cached_states: int
    workspace: int
    corpus: int
    grammars: int
    graphs: int
    max_model_len: int
    page_size: int

    @property
    def kv(self) -> int:
        return self.kv_pages * self.page_bytes

    @property
    def own_kv(self) -> int:
        return self.kv_pages * (self.page_bytes - (self.target_page_bytes if self.borrows else 0))

    @property
    def fixed(self) -> int:
        """Bytes besides the target's weights and the KV pages."""
        return self.draft_weights + self.states + self.workspace + self.corpus + self.grammars + self.graphs

    def lines(self, ranks: int = 1) -> Iterator[str]:
        """The plan as lines of the log. ranks: devices that each have this plan."""
        for name, why in self.reasons.items():
            yield f"{name}: {getattr(self, name)} (auto: {why})"
        each = f" of each of {ranks} ranks" if ranks > 1 else ""
        yield f"memory budget{each}: {size_text(self.available)}"
        yield f"  weights    {size_text(self.weights)}"
        if self.draft_weights:
            yield f"  draft      {size_text(self.draft_weights)}"
        shared = f", {size_text(self.kv - self.own_kv)} of them shared" if self.borrows else ""
        yield f"  KV pages   {size_text(self.kv)}: {self.kv_pages} pages of {self.page_size} tokens{shared}"
        if self.states:
            kept = f", including those of {self.cached_states} cached prefixes" if self.cached_states else ""
            yield f"  states     {size_text(self.states)} of recurrent layers{kept}"
        if self.corpus:
            yield f"  corpus     {size_text(self.corpus)}"
        if self.grammars:
            yield f"  grammars   {size_text(self.grammars)} reserved for tables of regular expressions and JSON schemas"
        yield f"  workspace  {size_text(self.workspace)} (activations, logits and the batch's tables)"
        if self.graphs:
            yield f"  graphs     {size_text(self.graphs)} (estimate)"
        if self.kv_pages < self.wanted_pages:
            yield (
                f"  the pool holds {self.kv_pages} of the {self.wanted_pages} pages that max_running requests of "
                f"max_model_len={self.max_model_len} tokens could need; when it is full, requests wait or are retracted"
            )

    def out_of_memory(self, doing: str, works: str = "") -> ShortOfMemoryError:
        """The error for memory that ran out while `doing` something, despite the plan. works: what to change; else what
        the plan follows from."""
        works = works or (
            f"use a lower memory_fraction ({self.memory_fraction:g} now), kv_pages ({self.kv_pages}), max_running "
            f"({self.max_running}) or prefill_chunk ({self.prefill_chunk})"
        )
        return ShortOfMemoryError(
            f"out of memory while {doing}: {size_text(self.available)} were planned for ({self._parts}); {works}"
        )

    def does_not_fit(self, what: str, smaller: tuple[str, int] | None = None) -> ShortOfMemoryError:
        """The error for a launch that ran out of memory, after which this engine cannot go on. smaller: a setting and
        its value with which an engine has smaller launches."""
        works = f" or kv_pages ({self.kv_pages})"
        if smaller is not None:  # with the same pages, as the plan would give them what is left
            works = f", or {smaller[0]}={smaller[1]} with kv_pages={self.kv_pages}"
        return ShortOfMemoryError(
            f"out of memory: {what} does not fit beside {self._parts}; use a lower memory_fraction "
            f"({self.memory_fraction:g} now){works}",
            None if smaller is None else {smaller[0]: smaller[1], "kv_pages": self.kv_pages},
        )

    @property
    def _parts(self) -> str:
        parts = f"weights {size_text(self.weights + self.draft_weights)}, KV {size_text(self.own_kv)}"
        parts += f", states {size_text(self.states)}" if self.states else ""
        more = f", graphs {size_text(self.graphs)}" if self.graphs else ""
        return f"{parts}, workspace {size_text(self.workspace)}{more}"


@dataclass(frozen=True)
class MemoryShare:
    """The share of engine `index` of `count` engines with one target, built one after the other: the first loads the
    weights, and each gets an equal share of the remaining memory. replicas: that divide the device's memory, each of
    which has such engines. pages: of one KV pool of the target for engines that run one at a time; each has only the
    pool of its draft to itself."""

    index: int = 0
    count: int = 1
    replicas: int = 1
    pages: int | None = None

    @property
    def borrows(self) -> bool:
        """Whether its target's KV pool is that of an engine before it."""
        return self.pages is not None and self.index > 0

    def within(self, pages: int) -> MemoryShare:
        """This share, of a pool that has so many pages."""
        return self if self.pages is None else replace(self, pages=min(self.pages, pages))

    def budget(self, free: int, fraction: float, weights: int) -> int:
        """Bytes for this engine, including its weights.

        free: bytes free now, after the earlier engines were built; fraction: what all engines of all replicas together
        may take of the memory that was free at first; weights: bytes of the target.
        """
        fraction /= self.replicas
        if self.pages is not None:  # which leave room for the engines after this one
            return int(fraction * free)
        if self.index == 0:
            left = fraction * free - weights
            return int(weights + min(left, left / self.count))  # a negative rest is not divided
        return int((fraction * (free + weights) - weights) / (self.count - self.index * fraction))


EXCLUSIVE = MemoryShare()


def available_memory(device: torch.device) -> int:
    """Free bytes of the device now."""
    if device.type == "cuda":
        import torch

        torch.cuda.empty_cache()  # temporary memory of an engine built earlier is free, too
        return int(torch.cuda.mem_get_info(device)[0])
    import psutil

    return int(psutil.virtual_memory().available)


class _Taken(NamedTuple):
    """Bytes that the engine's capacity decides."""

    workspace: int
    states: int
    corpus: int
    graphs: int


def plan_memory(
    config: EngineConfig,
    *,
    free: int,
    on_cpu: bool,
    model_len: int,
    weights: int,
    draft_weights: int,
    page_bytes: int,
    target_page_bytes: int = 0,
    state_bytes: int = 0,
    cached_state_bytes: int = 0,
    vocabulary: int,
    rows: int,
    token_bytes: int = 0,
    temporary: Callable[[int], int] = lambda running: 0,
    corpus_bytes: Callable[[int], int] = lambda running: 0,
    grammars: int = 0,
    graph_bytes: Callable[[int, int], int] = lambda running, chunk: 0,
    is_sparse: bool = False,
    share: MemoryShare = EXCLUSIVE,
) -> MemoryPlan:
    """Decide what is "auto", the size of the KV pool and the longest request.

    All sizes are in bytes. free: free memory of the device; model_len: positions the model supports; page_bytes: one
    page in all caches; target_page_bytes: in the target's; state_bytes: recurrent states of one device row;
    cached_state_bytes: those of one prefix; rows: query rows of a verify; token_bytes: activations of one token in a
    pass; temporary: other tensors of a pass with so many requests; corpus_bytes: the corpus with so many tokens in all
    slots; grammars: their tables; graph_bytes: CUDA graphs for so many requests and tokens of a pass; is_sparse:
    whether the model is a mixture of experts; share: this engine's share, of which only the first includes `weights`.
    Raises SpecbatchError, naming the setting, if it cannot fit.
    """
    size, slack = config.page_size, reserved_length(0, rows)
    asked_pages = config.kv_pages if share.pages is None else share.pages
    own_bytes = page_bytes - (target_page_bytes if share.borrows else 0)
    fraction, reserved = config.memory_fraction, {}
    if fraction == AUTO:
        fraction = usual_fraction(free, on_cpu=on_cpu)
        reserved["memory_fraction"] = f"{size_text(free - int(fraction * free))} of {size_text(free)} free are left"
    budget = share.budget(free, fraction, weights)
    weights = weights if share.index == 0 else 0
    longest = longest_request(config, model_len)

    def taken(running: int, chunk: int) -> _Taken:
        # Three copies of the logits of a full batch: raw, float32, and sorted or as probabilities.
        workspace = 3 * 4 * vocabulary * running * rows
        # Tokens and page table of every slot, 8 bytes each.
        tokens = (running + 1) * (longest + slack + 1)
        workspace += 8 * tokens * (size + 1) // size
        workspace += token_bytes * max(chunk, running * rows) + temporary(running)
        return _Taken(workspace, state_bytes * (running + 1), corpus_bytes(tokens), graph_bytes(running, chunk))

    def left(running: int, chunk: int) -> int:
        return budget - weights - draft_weights - grammars - sum(taken(running, chunk))

    least = own_bytes * (asked_pages or pages_for((config.max_model_len or 2) + slack, size))

    # Prefix states have the memory that nothing else needs. An automatic `max_running` leaves some for them: without
    # one for each prefix in use, prompts that share prefixes compute them again. With one request it is at most the
    # share that they have in any case, so that what runs without them still does.
    def for_prefixes(chunk: int) -> int:
        if not (cached_state_bytes and config.prefix_cache and config.max_running == AUTO) or on_cpu:
            return 0  # on a CPU `max_running` does not follow from the memory for KV
        return min(_CACHED_STATES * cached_state_bytes, max(left(1, chunk) - least, 0) // _CACHED_STATES_SHARE)

    capacity = choose(
        config,
        lambda running, chunk: left(running, chunk) - for_prefixes(chunk),
        page_bytes=own_bytes if asked_pages is None else 0,
        least=least,
        on_cpu=on_cpu,
        rows=rows,
        longest=longest + slack,
        is_sparse=is_sparse,
    )
    running, chunk = capacity.max_running, capacity.prefill_chunk
    workspace, states, corpus, graphs = taken(running, chunk)
    room, cached_states = left(running, chunk), 0
    _check_capacity(config, capacity, lambda running, chunk: left(running, chunk) >= own_bytes, workspace)
    one_request = pages_for(longest + slack, size)
    wanted = running * one_request
    if cached_state_bytes and config.prefix_cache:
        wished = max(_CACHED_STATES, 2 * running)
        # The configured capacities come first: cached states are optional. More than their share shortens no request.
        unused = room - (asked_pages or wanted) * own_bytes
        reserved_states = min(for_prefixes(chunk), room - (asked_pages or one_request) * own_bytes)
        spare = min(max(room // _CACHED_STATES_SHARE, reserved_states, unused), room - least)
        cached_states = max(0, min(wished, spare // cached_state_bytes))
        states, room = states + cached_states * cached_state_bytes, room - cached_states * cached_state_bytes
    limit = min(room, _CPU_KV_BYTES) if on_cpu else room
    least_bytes = own_bytes * (slack + 2) // size  # of a request, in pages of one token
    if asked_pages is None and size > longest + slack and own_bytes > limit >= least_bytes:
        works = f"a page takes {size_text(own_bytes)} and {size_text(limit)} are left for KV; use a smaller one"
        raise refuse("page_size", size, works)
    each = f" by each of {share.replicas} replicas" if share.replicas > 1 else ""
    asked = f"memory_fraction={fraction:g}" + (" (auto)" if reserved else "")
    if room < own_bytes:
        used = f"weights {size_text(weights + draft_weights)}, workspace {size_text(workspace)}"
        used += f", states {size_text(states)}" if states else ""
        used += f", corpus {size_text(corpus)}" if corpus else ""
        used += f", grammars {size_text(grammars)}" if grammars else ""
        used += f", graphs {size_text(graphs)}" if graphs else ""
        less = (
            "a smaller model or dtype"
            if weights + draft_weights > workspace
            else "a lower max_running or prefill_chunk"
        )
        enough = fraction * (budget - room + own_bytes) / max(budget, 1)
        more = f", or a memory_fraction of at least {1.005 * enough:.3g}" if enough < 1 else ""
        raise SpecbatchError(
            f"{asked}: {size_text(budget)} of {size_text(free)} free may be used"
            f"{each} and {used} leave no KV page; use {less}{more}"
        )
    if config.kv_pages is not None:
        pages = config.kv_pages
        if pages * own_bytes > room:
            raise refuse(
                "kv_pages",
                pages,
                f"that is {size_text(pages * own_bytes)} and {size_text(room)} are left; use at most "
                f"{room // own_bytes}, or a higher memory_fraction",
            )
    elif share.pages is not None:
        pages = min(share.pages, room // own_bytes) if own_bytes else share.pages
    else:
        pages = min(wanted, limit // page_bytes) if page_bytes else wanted  # 0 bytes: no attention
    if pages * size < slack + 2:
        if config.kv_pages is not None:
            least = pages_for(slack + 2, size)
            raise refuse("kv_pages", pages, f"with page_size={size} and {rows} verify rows use at least {least}")
        raise SpecbatchError(
            f"{asked}: of {size_text(free)} free, {size_text(room)} are left "
            f"for KV after {size_text(weights + draft_weights)} of weights; use a smaller model, dtype or max_running"
        )
    need = pages_for((config.max_model_len or 0) + slack, size)
    longest = longest_request(config, model_len, pages, slack, needs=need if need * page_bytes <= room else None)
    return MemoryPlan(
        max_running=running,
        prefill_chunk=chunk,
        memory_fraction=fraction,
        reasons=capacity.reasons | reserved,
        available=budget,
        weights=weights,
        draft_weights=draft_weights,
        page_bytes=page_bytes,
        target_page_bytes=target_page_bytes,
        borrows=share.borrows,
        kv_pages=pages,
        wanted_pages=wanted,
        states=states,
        cached_states=cached_states,
        workspace=workspace,
        corpus=corpus,
        grammars=grammars,
        graphs=graphs,
        max_model_len=longest,
        page_size=size,
    )


def longest_request(
    config: EngineConfig, model_len: int, pages: int | None = None, slack: int = 0, *, needs: int | None = None
) -> int:
    """Tokens of the longest prompt with its answer, as far as they are limited by the settings, the positions of the
    models and the KV pages, if their number is known. Refused: a longer `max_model_len`.

    slack: as in `reserved_length(0, rows)`; needs: how many pages would do, if there is memory for them
    """
    asked, longest = config.max_model_len, min(config.max_model_len or model_len, model_len)
    if asked and asked > model_len:
        raise refuse("max_model_len", asked, f"the model supports at most {model_len}")
    if pages is None:
        return longest
    fits = pages * config.page_size - slack
    if asked and fits < asked:
        more = f", or kv_pages={needs}" if needs is not None else ""
        works = f"the KV pool of {pages} pages holds requests of {fits}; use at most that{more}"
        raise refuse("max_model_len", asked, works)
    return min(longest, fits)


def _check_capacity(config: EngineConfig, capacity: Capacity, fits: Callable[[int, int], bool], workspace: int) -> None:
    """Refuse a `max_running` or `prefill_chunk` that leaves no KV page where a lower one does."""
    running, chunk = capacity.max_running, capacity.prefill_chunk
    if fits(running, chunk):
        return
    of_running = most_that_fit(lambda count: fits(count, chunk), running)
    of_chunk = most_that_fit(lambda count: fits(running, count), chunk)
    for name, value, most in (("max_running", running, of_running), ("prefill_chunk", chunk, of_chunk)):
        if most and getattr(config, name) == value:
            works = (
                f"logits, activations and tables take {size_text(workspace)} and leave no KV page; use at most {most}"
            )
            raise refuse(name, value, works)


def size_text(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
