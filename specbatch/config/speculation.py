"""`Speculation`: how tokens are drafted and verified, a part of `EngineConfig`.

Each field has its help text and rule in its metadata (`specbatch.config.settings`), from which the command line derives
its options. Invalid values and combinations are rejected here, before anything is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from specbatch.algorithms import ALGORITHMS, NO_SPECULATION, Algorithm, algorithms_with
from specbatch.config.acceptance_profile import AcceptanceProfile, geometric
from specbatch.config.draft_shape import AUTO, DraftShape, auto_budgets, auto_draft_lengths, shape_of
from specbatch.config.settings import Rule, check_fields, is_number, number, or_auto, setting, whole
from specbatch.errors import at_least, refuse

SCHEDULES = ("v1", "v2")
CORPUS_MIN, CORPUS_MIN_SAMPLED = 4, 8  # tokens; the second where the algorithm samples drafts
# For help texts.
_ALIASES = "; ".join(
    f"{name}: another name for {entry.alias_of}" for name, entry in ALGORITHMS.items() if entry.alias_of
)


@dataclass(frozen=True)
class Speculation:
    """How tokens are drafted, and when the host reads the results.

    `draft_steps`, `draft_topk` and `draft_tokens` give the shape of a draft. With none of them it is the shape that the
    algorithm was published with; `draft_shape.shape_of` completes a partial one.

    Details beyond the help texts of the fields:

    draft_tokens   "auto" drafts chains of at most draft_steps tokens (or the default number); their length follows from
                   measured step times and acceptance. Where drafts are sampled by a model or a head, the tokens of a
                   seed then depend on these times; their distribution does not
    draft          "self:skip=12-15,20-21" names inclusive ranges of layers and shares the target's weights. A draft
                   with random weights is "dummy" or a config.json. "mtp" takes none: its head is part of the target
    aux_layers     counted as EAGLE-3 heads do: the input of layer k is the output of layer k - 1
    draft_rope_theta  overrides the theta in the head's config. A config without one means 10000, and some heads were
                   trained with 10000 whatever their config says
    draft_quantization  blocks of 128 x 128 values share a scale, and `EngineConfig.fp8_activations` applies. See
                   docs/drafts.md for the matrices that keep their type
    corpus         other answers from which drafts are made; the algorithm drafts where these have nothing. Those of the
                   run, running and finished, are among them in any case. With a corpus the tokens of a seed are the
                   baseline's for all algorithms, as no drafts are sampled
    simulate_accept_length, simulate_accept  of each request each draft is accepted with its conditional probability,
                   whatever it is (`config.acceptance_profile`); the generated text is not the model's. The mean
                   is that of the most drafts, at most draft_steps + 1: fewer drafts, as "auto" and n-gram lookup make
                   them, are accepted as often position by position. Positions of a tree are its depths
    verify_budget  of a batch of B requests, B times as many rows are computed (rounded up): see
                   `specbatch.engine.device.verify_budget`. "auto" chooses the number for each step from measured step
                   times and the expected acceptance: see `specbatch.engine.schedule.verify_rows`
    verification   see `specbatch.engine.device.acceptance`; greedy requests are verified alike by both rules
    """

    algorithm: str = setting(
        NO_SPECULATION,
        f"Drafting algorithm. none: the baseline, the same iteration without drafts. {_ALIASES}.",
        choices=tuple(ALGORITHMS),
    )
    schedule: str = setting(
        "v2",
        "v1: wait for each result before planning the next iteration. v2: overlap scheduling, "
        "launches the next step before reading the last result.",
        choices=SCHEDULES,
    )
    draft: str | None = setting(
        None,
        "standalone: a draft model with the same vocabulary, or self:skip=12-15 (the target without those layers). "
        "Others: the draft trained for the target (dummy: random weights). A folder, hub id or known name.",
    )
    draft_tokens: int | Literal["auto"] | None = setting(
        None,
        "Draft tokens per step, excluding the last committed token (root). Default: the "
        "algorithm's usual number; for block drafts, as many as the block; for drafts of speculators, that of their "
        "config (speculative_tokens). SGLang counts the root: 4 "
        "there is 3 here. "
        "auto: 0 up to the default or --draft-steps, chosen from measured step times and acceptance.",
        metavar="INTEGER|auto",
    )
    draft_steps: int | None = setting(
        None, "Draft passes: the depth of a tree. A chain takes as many as it has drafted tokens."
    )
    draft_topk: int | None = setting(
        None, "Children per expanded node; 1 is a chain. ngram: matching continuations merged into a tree."
    )
    aux_layers: tuple[int, ...] | None = setting(
        None,
        f"{', '.join(algorithms_with('aux_layers'))}: layers of the target whose inputs the head reads, such as 2,18,"
        "33. Default: from its config.",
    )
    draft_rope_theta: float | None = setting(
        None,
        f"{', '.join(algorithms_with('draft_rope_theta'))}: RoPE theta of the head. Default: from its config.",
        number(lambda theta: theta > 0, "use a positive number, such as 10000.0"),
    )
    draft_quantization: str | None = setting(
        None,
        "fp8: quantize the matrices of the draft as they are loaded, and a copy of its output matrix, which may be the "
        "target's. Which tokens are emitted with what probability does not change, only how many drafts are accepted.",
        choices=("fp8",),
    )
    ngram_min: int = setting(
        2, "Shortest n-gram to match.", whole(1, 16, "use a whole number of at least 1 and at most 16")
    )
    ngram_max: int = setting(4, "Longest n-gram to match; tried first.", whole(1))
    corpus: str | None = setting(
        None,
        "Draft from other answers where they continue the text, else with the algorithm. run: the answers of this run. "
        "FILE,FILE: these, and the answers of files: outputs of generate and eval (.jsonl, or a folder of eval), or a "
        "text in each line (.txt).",
        Rule(
            lambda corpus: isinstance(corpus, str) and all(name.strip() for name in corpus.split(",")),
            "use run, or files separated by commas",
        ),
    )
    corpus_tokens: int = setting(
        1 << 20,
        "Tokens of finished answers that the corpus holds, in 28 to 40 bytes of device memory each. New ones replace "
        "the oldest.",
        whole(1 << 10, 1 << 28),
    )
    corpus_min: int | None = setting(
        None,
        "Shortest n-gram to look up in the corpus; four and two times as long ones are tried first. "
        f"Default: {CORPUS_MIN} with ngram, and {CORPUS_MIN_SAMPLED} with a draft model or head, whose drafts are "
        "better than what follows shorter ones.",
        whole(1, 16),
    )
    verification: str = setting(
        "token",
        "How sampled drafts are verified; both are lossless. block: the whole chain at once (Sun et al. 2024), which "
        "accepts at least as many on average. For chains of models and heads.",
        choices=("token", "block"),
    )
    verify_budget: float | Literal["auto"] | None = setting(
        None,
        "Rows that the target verifies per request and step on average, newest token included. All requests draft "
        "--draft-tokens, and the drafts that are most likely to be accepted are verified. auto: the number for each "
        "step is chosen from measured step times and acceptance. Default: all drafts.",
        or_auto(Rule(is_number, "use a number above 1")),
        metavar="FLOAT|auto",
    )
    simulate_accept_length: float | None = setting(
        None,
        "Benchmarks only: accept drafts at random instead of comparing them with the target, with one probability for "
        "all positions such that a verify with all drafts emits this many tokens on average (bonus included).",
    )
    simulate_accept: AcceptanceProfile | None = setting(
        None,
        "Benchmarks only: the same with a probability for each draft position, given that all drafts before it are "
        "accepted: a JSON file, by length of the context or not, a golden acceptance curve (.json, .yaml; FILE#NAME is "
        "one of several), the folder of a run, or probabilities such as 0.8,0.7,0.6.",
        Rule(lambda profile: isinstance(profile, AcceptanceProfile), "use acceptance_profile.read_profile(TEXT)"),
    )

    def __post_init__(self) -> None:
        check_fields(self)
        _ = self.shape  # raises if it is impossible
        if self.draft is not None and not isinstance(self.draft, str):
            raise refuse("draft", self.draft, "name a folder, a hub id, a known model or self:skip=FIRST-LAST")
        needed = self.entry.draft
        if needed is not None and not self.draft:
            raise refuse("draft", self.draft, f"algorithm {self.algorithm!r} needs {needed}")
        if needed is None and self.draft:
            takers = ", ".join(repr(name) for name, entry in ALGORITHMS.items() if entry.draft is not None)
            raise refuse("draft", self.draft, f"algorithm {self.algorithm!r} takes no draft; those that do: {takers}")
        self._check_heads()
        if self.ngram_max < self.ngram_min or self.ngram_max > 16:
            raise refuse("ngram_max", self.ngram_max, f"use {self.ngram_min} (ngram_min) to 16")
        self._check_corpus()
        self._check_simulation()
        self._check_verification()
        self._check_budget()

    def __str__(self) -> str:
        if self.algorithm == NO_SPECULATION:
            return f"no speculation, schedule {self.schedule}"
        draft = f" {self.draft}" if self.draft else ""
        simulated = self.simulated
        note = "" if simulated is None else f", simulated acceptance ({simulated})"
        note += "" if self.draft_quantization is None else f", draft in {self.draft_quantization.upper()}"
        note += "" if self.corpus is None else f", corpus {self.corpus}"
        if self.verify_budget is not None:
            rows = f"up to {self.budgets[-1]:g}" if self.budgets else f"{self.verify_budget:g}"
            note += f", {rows} rows verified per request"
        note += "" if self.verification == "token" else f", {self.verification} verification"
        most = "up to " if self.is_auto else ""
        return f"{self.algorithm}{draft}, {most}{self.shape}, schedule {self.schedule}{note}"

    @property
    def entry(self) -> Algorithm:
        """The registry's entry of the algorithm."""
        return ALGORITHMS[self.algorithm]

    @property
    def shape(self) -> DraftShape:
        """Steps, children per node and nodes, all of them known."""
        tokens = self.draft_tokens
        if tokens == AUTO:
            if (self.draft_topk or 1) > 1:
                raise refuse("draft_topk", self.draft_topk, "draft_tokens='auto' drafts chains only; use 1")
            tokens = None
        return shape_of(self.algorithm, self.draft_steps, self.draft_topk, tokens)

    def with_num_drafts(self, num_drafts: int | None) -> Speculation:
        """With chains of that many drafts, at most as many if their length is chosen as it runs; None: unchanged."""
        if num_drafts is None:
            return self
        return replace(self, draft_steps=num_drafts) if self.is_auto else replace(self, draft_tokens=num_drafts)

    @property
    def quantizes_draft(self) -> bool:
        """Whether the draft is quantized to FP8 as it is loaded."""
        return self.draft_quantization is not None

    @property
    def is_auto(self) -> bool:
        return self.draft_tokens == AUTO and self.algorithm != NO_SPECULATION

    @property
    def draft_lengths(self) -> tuple[int, ...]:
        """How many tokens an iteration may draft, rising; a single number unless that is chosen as it runs. Where the
        budget is chosen, too, either none or all."""
        if self.is_auto:
            return (0, self.num_drafts) if self.budgets else auto_draft_lengths(self.num_drafts)
        return (self.num_drafts,)

    @property
    def budgets(self) -> tuple[float, ...]:
        """How many rows per request a verify may have, rising, if that is chosen as it runs; else empty."""
        return auto_budgets(self.num_drafts) if self.verify_budget == AUTO else ()

    @property
    def num_drafts(self) -> int:
        """Tokens drafted per verify, or the most of them; 0 for the baseline."""
        return 0 if self.algorithm == NO_SPECULATION else self.shape.tokens

    @property
    def drafts_trees(self) -> bool:
        """Whether drafts are trees; else they are chains, or there are none."""
        return self.algorithm != NO_SPECULATION and self.shape.topk > 1

    @property
    def depth(self) -> int:
        """Drafts that a verify can accept: of a chain all, of a tree one for each step."""
        return 0 if self.algorithm == NO_SPECULATION else self.shape.steps

    @property
    def simulated(self) -> AcceptanceProfile | None:
        """The model of simulated acceptance, with a probability for each of `depth` drafts; None if it is real."""
        if self.simulate_accept is not None:
            return self.simulate_accept.of_drafts(self.depth)
        mean = self.simulate_accept_length
        return None if mean is None else geometric(mean, self.depth)

    def _check_heads(self) -> None:
        for name in ("aux_layers", "draft_rope_theta", "draft_quantization", "ngram_min", "ngram_max"):
            is_given = getattr(self, name) != type(self).__dataclass_fields__[name].default
            if is_given and name not in self.entry.settings:
                takers = algorithms_with(name)
                works = f"algorithm {self.algorithm!r} has no such setting, only {', '.join(map(repr, takers))}"
                raise refuse(name, getattr(self, name), works)
        layers = self.aux_layers
        if layers is not None:
            if not isinstance(layers, tuple) or not layers:
                raise refuse("aux_layers", layers, "give a tuple of layers, such as (2, 18, 33)")
            for layer in layers:
                at_least("aux_layers", layer, 1)

    @property
    def corpus_ngram(self) -> int:
        """Length of the shortest n-grams that are looked up in the corpus."""
        return self.corpus_min or (CORPUS_MIN_SAMPLED if self.entry.samples_drafts else CORPUS_MIN)

    @property
    def corpus_files(self) -> tuple[str, ...]:
        """Files of earlier answers."""
        names = [name.strip() for name in (self.corpus or "run").split(",")]
        return tuple(name for name in names if name != "run")

    @property
    def reads_files(self) -> bool:
        """Whether there is a draft or a corpus on disk, which may not fit the target."""
        return self.entry.loads_draft or bool(self.corpus_files)

    def _check_corpus(self) -> None:
        if self.corpus is None:
            if self.corpus_min is not None:
                raise refuse("corpus_min", self.corpus_min, "there is no corpus to look up; add corpus='run' or files")
            if self.corpus_tokens != Speculation.corpus_tokens:
                works = "there is no corpus that would hold them; add corpus='run' or files"
                raise refuse("corpus_tokens", self.corpus_tokens, works)
            return
        if self.algorithm == NO_SPECULATION:
            raise refuse("corpus", self.corpus, "algorithm 'none' drafts nothing; use 'ngram', or leave it out")
        if self.drafts_trees:
            raise refuse("draft_topk", self.draft_topk, "with a corpus chains are drafted; use 1")

    def _check_simulation(self) -> None:
        mean, profile = self.simulate_accept_length, self.simulate_accept
        for name, value in (("simulate_accept_length", mean), ("simulate_accept", profile)):
            if value is not None and self.algorithm == NO_SPECULATION:
                raise refuse(name, value, "algorithm 'none' drafts nothing; leave it out")
        if profile is not None:
            if mean is not None:
                raise refuse("simulate_accept_length", mean, "simulate_accept gives the accept length; leave one out")
            profile.of_drafts(self.depth)
        elif mean is not None:
            most = self.depth + 1
            if not is_number(mean) or not 1 <= mean <= most:
                raise refuse("simulate_accept_length", mean, f"use 1 to {most} (draft_steps + 1)")

    def _check_verification(self) -> None:
        if self.verification == "token":
            return
        if not self.entry.samples_drafts:
            samplers = ", ".join(repr(name) for name, entry in ALGORITHMS.items() if entry.samples_drafts)
            works = f"algorithm {self.algorithm!r} samples no drafts; use 'token', or one of {samplers}"
        elif self.drafts_trees:
            works = "the drafts of a tree are not sampled; use 'token', or draft_topk=1"
        elif self.simulated is not None:
            works = "acceptance is simulated; use 'token', or leave the simulation out"
        elif self.corpus is not None:
            works = "with a corpus drafts are verified by comparison; use 'token', or leave the corpus out"
        else:
            return
        raise refuse("verification", self.verification, works)

    def _check_budget(self) -> None:
        budget = self.verify_budget
        if budget is None:
            return
        most = self.num_drafts + 1
        if self.algorithm == NO_SPECULATION:
            works = "algorithm 'none' drafts nothing; leave it out"
        elif self.is_auto and budget != AUTO:
            works = "draft_tokens='auto' chooses one length for all requests; use a number, or 'auto' for both"
        elif self.drafts_trees:
            works = "the drafts of a tree are verified together; use draft_topk=1, or leave the budget out"
        elif self.verification != "token":
            works = f"verification={self.verification!r} decides on whole chains; use 'token', or leave the budget out"
        elif self.simulated is not None:
            works = "simulated acceptance does not depend on confidence; leave the simulation or the budget out"
        elif budget != AUTO and not 1 < budget <= most:
            works = f"the newest token of a request takes one row; use more than 1 and up to {most} (draft_tokens + 1)"
        else:
            return
        raise refuse("verify_budget", budget, works)
