"""Every draft of every head, in every spelling of its format, against its equations over the whole text.

Prompts in odd chunks, then iterations that accept all, none and some; what is compared is the law of each draft.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from specbatch.config import EngineConfig, Speculation
from specbatch.context import Prefill, Span
from specbatch.drafters import eagle, eagle3, mtp
from specbatch.drafters.base import Drafter, DraftPlan
from specbatch.kernels.backends import prefill_backend
from specbatch.models.llama import Features, Llama
from specbatch.models.loader import Loader
from specbatch.verification import Proposal

PLANS = {"eagle": eagle.plan, "eagle3": eagle3.plan, "mtp": mtp.plan}
LENGTHS = (2, 3, 5, 6, 13, 21)
CPU = torch.device("cpu")


def loader_of(here: Any) -> Loader:
    attention = prefill_backend("torch", CPU, torch.float32, 16)
    return Loader(
        dtype=torch.float32,
        kv_dtype=torch.float32,
        device=CPU,
        max_positions=128,
        pages=here.pages,
        page_size=4,
        attention={"target": attention, "draft": attention},
        chunk=64,
    )


class Run:
    """A target and its drafter over the rows of a bench."""

    def __init__(self, here: Any, stub: Any, algorithm: str, count: int, draft: str | None, **asked: Any) -> None:
        self.here, self.count, self.lines = here, count, list[str]()
        speculation = Speculation(algorithm, draft=draft, draft_tokens=count, **asked)
        config = EngineConfig(model="target", max_running=len(LENGTHS) + 2, speculation=speculation)
        plan: DraftPlan = PLANS[algorithm](stub, config, self.lines.append)
        loader = loader_of(here)
        self.plan = plan
        self.target = stub.model().with_aux(plan.aux)
        self.cache = here.cache_for(self.target)
        self.drafter: Drafter = plan.build(self.target, loader)

    def prefill(self, chunk: int) -> None:
        """All positions before the root, which is not known yet: something else stands at its place."""
        here = self.here
        ends = [len(text) - 1 for text in here.texts]
        roots = here.batch.tokens[here.rows, torch.tensor(ends)]
        here.batch.tokens[here.rows, torch.tensor(ends)] = (roots + 1) % 13
        for start in range(0, max(ends), chunk):
            spans = [
                Span(row, start, min(start + chunk, end))
                for row, end in zip(here.rows.tolist(), ends, strict=True)
                if start < end
            ]
            shape = Prefill(here.batch.page_table, spans, 4)
            tokens = here.batch.tokens[shape.rows, shape.positions]
            self.drafter.prefill(here.batch, shape, self.target.forward(tokens, shape.positions, shape.on(self.cache)))
        here.batch.tokens[here.rows, torch.tensor(ends)] = roots

    def verify(self, step: Any, proposal: Proposal, accepted: list[int], bonus: list[int]) -> None:
        here = self.here
        tokens, positions = here.batch.stage(step.rows, step.lengths, proposal.tokens)
        shape = step.verify(step.lengths, self.count + 1)
        features = self.target.forward(tokens, positions, shape.on(self.cache))
        here.commit(proposal.tokens, accepted, bonus)
        self.drafter.absorb(step, features, torch.tensor(accepted))


def features_of(target: Llama, text: list[int], aux: bool) -> torch.Tensor:
    """Of every token, by the target alone."""
    seen: list[Features] = []
    from specbatch.memory.kv_cache import KVCache

    attention = prefill_backend("torch", CPU, torch.float32, 16)
    cache = KVCache(target.config, len(target.layers), 1, len(text), torch.float32, CPU, attention)
    shape = Prefill(torch.ones(1, 1, dtype=torch.int64), [Span(0, 0, len(text))], len(text))
    seen.append(target.forward(torch.tensor(text), shape.positions, shape.on(cache)))
    found = seen[0].aux if aux else seen[0].last
    assert found is not None
    return found


def acceptances(count: int, randomness: random.Random) -> list[list[int]]:
    rows = len(LENGTHS)
    turns = [[count] * rows, [0] * rows, [count] * rows]
    return turns + [[randomness.randint(0, count) for _ in range(rows)] for _ in range(3)]


def check(run: Run, reference: Any, boundaries: tuple[int, ...] = (), ids: torch.Tensor | None = None) -> None:
    """boundaries: where the features are read, as the test means it."""
    randomness = random.Random(run.count)
    # A view of its own, so that a wrong layer in the plan shows.
    target = run.target.with_aux(tuple(k - 1 for k in boundaries))
    for turn, accepted in enumerate(acceptances(run.count, randomness)):
        step = run.here.step(run.count, spare=(0, 6)[turn % 2], temperature=1.0)
        proposal = run.drafter.propose(step)
        assert proposal.probabilities is not None
        assert proposal.drafted.tolist() == [run.count] * len(LENGTHS)
        for index, text in enumerate(run.here.texts):
            drafts = proposal.tokens[index].tolist()
            features = features_of(target, text[:-1], bool(boundaries))
            logits = reference.drafts(features, text, drafts, ids)
            torch.testing.assert_close(proposal.probabilities[index].double(), logits.softmax(-1), rtol=1e-4, atol=2e-5)
        run.verify(step, proposal, accepted, [randomness.randrange(13) for _ in LENGTHS])


@pytest.fixture
def start(bench: Any) -> Callable[..., Run]:
    def build(stub: Any, algorithm: str, draft: str | None = None, count: int = 3, chunk: int = 5, **asked: Any) -> Run:
        randomness = random.Random(count)
        here = bench([[randomness.randrange(13) for _ in range(length)] for length in LENGTHS])
        run = Run(here, stub, algorithm, count, draft, **asked)
        run.prefill(chunk)
        return run

    return build


# -- EAGLE -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "chunk"), [(1, 1000), (3, 3), (4, 7), (2, 1)])
@pytest.mark.parametrize("bias", [True, False])
def test_eagle(kit: Any, write: Any, start: Any, bias: bool, count: int, chunk: int) -> None:
    """Without a theta of its own a head means 10000, whatever its target's is; bias by presence."""
    stub, tensors = kit.TargetStub(2), kit.eagle(bias)
    folder = write(kit.llama(bias=not bias, architectures=["LlamaForCausalLMEagle"]), tensors)
    run = start(stub, "eagle", folder, count, chunk)
    check(run, kit.RefEagle(tensors, stub))
    assert any("rope theta 10000 (from class default), the target's theta is 77" in line for line in run.lines)


@pytest.mark.parametrize(
    "spelling", [{"rope_theta": 500.0}, {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}}]
)
@pytest.mark.parametrize("stored", [{}, {"binary": True}, {"prefix": "model."}])
def test_eagle_in_its_spellings(kit: Any, write: Any, start: Any, spelling: Any, stored: Any) -> None:
    stub, tensors = kit.TargetStub(2), kit.eagle(own=True)
    tensors |= kit.randomise(
        {f"layer.self_attn.{part}_proj.bias": (heads * kit.DIM,) for part, heads in (("q", 4), ("k", 2), ("v", 2))}, 9
    )
    run = start(stub, "eagle", write(kit.llama(**spelling), tensors, **stored))
    check(run, kit.RefEagle(tensors, stub, theta=500.0))


def test_a_theta_that_is_asked_for_wins(kit: Any, write: Any, start: Any) -> None:
    stub, tensors = kit.TargetStub(2), kit.eagle()
    run = start(stub, "eagle", write(kit.llama(rope_theta=500.0), tensors), draft_rope_theta=30.0)
    check(run, kit.RefEagle(tensors, stub, theta=30.0))
    assert any("rope theta 30 (from draft_rope_theta)" in line for line in run.lines)


# -- EAGLE-3 -----------------------------------------------------------------------------------------------------


def ids_of(tensors: Any) -> torch.Tensor:
    return torch.arange(len(tensors["d2t"])) + tensors["d2t"]


@pytest.mark.parametrize(("count", "chunk"), [(1, 1000), (3, 3), (4, 7), (2, 1)])
def test_eagle3(kit: Any, write: Any, start: Any, count: int, chunk: int) -> None:
    """SafeAILab's spelling: midlayer, a reduced vocabulary, no theta, the usual layers."""
    stub, tensors = kit.TargetStub(8), kit.eagle3()
    config = kit.llama(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=9)
    run = start(stub, "eagle3", write(config, tensors, "midlayer"), count, chunk)
    check(run, kit.RefEagle3(tensors, stub), (2, 4, 5), ids_of(tensors))
    assert any("inputs of layers 2, 4, 5 of 8 (from default)" in line for line in run.lines)
    assert any("rope theta 10000 (from class default), the target's theta is 77" in line for line in run.lines)
    assert any("drafts 9 of the target's 13 tokens" in line for line in run.lines)


NESTED = [([1, 3, 5], (2, 4, 6)), ([2, 3, 5], (2, 3, 5)), ([], (2, 4, 5))]


@pytest.mark.parametrize(("listed", "boundaries"), NESTED)
@pytest.mark.parametrize("rope", [{"rope_theta": 500.0}, {"rope_parameters": {"rope_theta": 500.0}}])
def test_eagle3_as_specforge_writes_it(
    kit: Any, write: Any, start: Any, rope: Any, listed: list[int], boundaries: tuple[int, ...]
) -> None:
    """Layers in eagle_config are outputs if the first is 1, else inputs; names have a prefix; all tokens are drafted,
    through the target's matrix."""
    stub, tensors = kit.TargetStub(8), kit.eagle3(known=None, more={"fc.bias": kit.HIDDEN})
    tensors |= kit.randomise({"embed_tokens.weight": (13, kit.HIDDEN)}, 8)
    nested = {"eagle_aux_hidden_state_layer_ids": listed, "use_aux_hidden_state": True}
    config = kit.llama(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=None, eagle_config=nested, **rope)
    run = start(stub, "eagle3", write(config, tensors, "midlayer", prefix="model."))
    check(run, kit.RefEagle3(tensors, stub, theta=500.0), boundaries)


@pytest.mark.parametrize("before", [True, False, None])
@pytest.mark.parametrize(
    "rope", [{"rope_theta": 500.0}, {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}}]
)
def test_eagle3_as_speculators_writes_it(kit: Any, write: Any, start: Any, rope: Any, before: bool | None) -> None:
    """A Qwen3 layer, described in a table of its own; layers at the top are inputs, 6 of 6 that of the final norm."""
    more = {f"layer.self_attn.{part}_norm.weight": 12 for part in "qk"}
    stub, tensors = kit.TargetStub(6), kit.eagle3(known=9, dim=12, more=more)
    config = {
        "speculators_model_type": "eagle3",
        "transformer_layer_config": kit.llama(architectures=None, model_type="qwen3", head_dim=12, **rope),
        "draft_vocab_size": 9,
        "eagle_aux_hidden_state_layer_ids": [1, 3, 6],
        "norm_before_residual": before,
    }
    run = start(stub, "eagle3", write(config, tensors))
    reference = kit.RefEagle3(tensors, stub, theta=500.0, norm_before_residual=bool(before))
    check(run, reference, (1, 3, 6), ids_of(tensors))


def test_eagle3_with_norms_before_fc_and_behind(kit: Any, write: Any, start: Any) -> None:
    stub, tensors = kit.TargetStub(8), kit.eagle3(more={"input_norm.weight": 3 * kit.HIDDEN})
    config = kit.llama(draft_vocab_size=9, norm_before_fc=True, norm_output=True)
    run = start(stub, "eagle3", write(config, tensors))
    check(run, kit.RefEagle3(tensors, stub, norm_output=True), (2, 4, 5), ids_of(tensors))


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("legacy", [True, False])
def test_eagle3_with_a_norm_for_each_feature(kit: Any, write: Any, start: Any, legacy: bool, binary: bool) -> None:
    stub, tensors = kit.TargetStub(8), kit.eagle3(more={f"fc_norm.{n}.weight": kit.HIDDEN for n in range(3)})
    names = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")
    rename = {f"fc_norm.{n}": name for n, name in enumerate(names)} if legacy else {}
    config = kit.llama(draft_vocab_size=9) | ({} if legacy else {"fc_norm": True})
    run = start(stub, "eagle3", write(config, tensors, "midlayer", rename=rename, binary=binary))
    check(run, kit.RefEagle3(tensors, stub), (2, 4, 5), ids_of(tensors))


def test_eagle3_of_another_width_than_its_target(kit: Any, write: Any, start: Any) -> None:
    """With matrices of its own it may be narrower."""
    stub, tensors = kit.TargetStub(8), kit.eagle3(hidden=16)
    tensors |= kit.randomise({"embed_tokens.weight": (13, 16)}, 8)
    config = kit.llama(draft_vocab_size=9, hidden_size=16, target_hidden_size=kit.HIDDEN)
    run = start(stub, "eagle3", write(config, tensors))
    check(run, kit.RefEagle3(tensors, stub), (2, 4, 5), ids_of(tensors))


def test_layers_that_are_asked_for_win(kit: Any, write: Any, start: Any) -> None:
    stub, tensors = kit.TargetStub(8), kit.eagle3()
    config = kit.llama(draft_vocab_size=9, eagle_aux_hidden_state_layer_ids=[1, 2, 3])
    run = start(stub, "eagle3", write(config, tensors), aux_layers=(7, 2, 8))
    check(run, kit.RefEagle3(tensors, stub), (7, 2, 8), ids_of(tensors))


# -- MTP ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "chunk"), [(1, 1000), (3, 3), (4, 7), (2, 1)])
@pytest.mark.parametrize("turning", [8, 4, 2])
def test_mtp(kit: Any, start: Any, count: int, chunk: int, turning: int) -> None:
    """The rope is the target's; here a part of each head may turn in the head alone."""
    tensors = kit.mtp()
    stub = kit.TargetStub(2, mtp=kit.stored(tensors))
    whole, plain = stub.config, stub.model()
    stub.config = replace(whole, rope=replace(whole.rope, rotary_dim=turning))
    stub.model = lambda: plain
    check(start(stub, "mtp", None, count, chunk), kit.RefMtp(tensors, stub, theta=77.0, turning=turning))


# -- all ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", PLANS)
def test_greedy_drafts_are_the_likeliest(kit: Any, write: Any, start: Any, algorithm: str) -> None:
    tensors = getattr(kit, algorithm)()
    stub = kit.TargetStub(8, mtp=kit.stored(tensors) if algorithm == "mtp" else None)
    folder = None if algorithm == "mtp" else write(kit.llama(draft_vocab_size=9), tensors)
    run = start(stub, algorithm, folder)
    ids = ids_of(tensors) if algorithm == "eagle3" else None
    reference = {"eagle": kit.RefEagle, "eagle3": kit.RefEagle3, "mtp": kit.RefMtp}[algorithm](tensors, stub)
    reference.theta = 77.0 if algorithm == "mtp" else 10000.0
    for accepted in acceptances(3, random.Random(1)):
        step = run.here.step(3)
        proposal = run.drafter.propose(step)
        assert proposal.probabilities is None
        for index, text in enumerate(run.here.texts):
            features = features_of(run.target, text[:-1], algorithm == "eagle3")
            logits = reference.drafts(features, text, proposal.tokens[index].tolist(), ids)
            assert proposal.tokens[index].tolist() == logits.argmax(-1).tolist()
        run.verify(step, proposal, accepted, [1] * len(LENGTHS))


@pytest.mark.parametrize("algorithm", PLANS)
def test_a_batch_may_shrink_and_change_its_order(kit: Any, write: Any, start: Any, algorithm: str) -> None:
    tensors = getattr(kit, algorithm)()
    stub = kit.TargetStub(8, mtp=kit.stored(tensors) if algorithm == "mtp" else None)
    folder = None if algorithm == "mtp" else write(kit.llama(draft_vocab_size=9), tensors)
    run, randomness = start(stub, algorithm, folder), random.Random(3)
    ids = ids_of(tensors) if algorithm == "eagle3" else None
    reference = {"eagle": kit.RefEagle, "eagle3": kit.RefEagle3, "mtp": kit.RefMtp}[algorithm](tensors, stub)
    reference.theta = 77.0 if algorithm == "mtp" else 10000.0
    here = run.here
    while len(here.texts) > 1:
        step = here.step(3)
        proposal = run.drafter.propose(step)
        for index, text in enumerate(here.texts):
            features = features_of(run.target, text[:-1], algorithm == "eagle3")
            logits = reference.drafts(features, text, proposal.tokens[index].tolist(), ids)
            assert proposal.tokens[index].tolist() == logits.argmax(-1).tolist()
        accepted = [randomness.randint(0, 3) for _ in here.texts]
        run.verify(step, proposal, accepted, [1] * len(here.texts))
        order = randomness.sample(range(len(here.texts)), len(here.texts) - 1)
        here.rows, here.texts = here.rows[order], [here.texts[index] for index in order]
