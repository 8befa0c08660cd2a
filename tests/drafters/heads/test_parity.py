"""Drafts of every head, in every config format, match the reference equations over the whole text.

Prompts are prefilled in chunks, then iterations accept all, none or some drafts; distributions are compared.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import draft_heads as heads
import pytest
import torch
from crossed import crossed, first_quick, slow_but

from specbatch.errors import SpecbatchError
from specbatch.kernels.sampling.rng import DRAFT, uniform_ref, verify_keys
from specbatch.kernels.sampling.sample import sample_ref
from specbatch.models.config import ModelConfig

LENGTHS = (2, 3, 5, 6, 13, 21)


def check(
    run: Any, reference: Any, boundaries: tuple[int, ...] = (), ids: torch.Tensor | None = None, turns: int = 2
) -> None:
    """boundaries: the layers whose input features the test expects to be read."""
    randomness = random.Random(run.count)
    # A separate view, so that a wrong layer in the plan is detected.
    target = run.target.with_aux(tuple(k - 1 for k in boundaries))
    for turn, accepted in enumerate(run.here.acceptances(run.count, randomness)[:turns]):
        step = run.here.step(run.count, spare=(0, 6)[turn % 2], temperature=1.0)
        proposal = run.drafter.propose(step)
        assert proposal.drafted.tolist() == [run.count] * len(LENGTHS)
        expected = expected_logits(target, run.here.texts, reference, proposal, ids)
        torch.testing.assert_close(proposal.probabilities.double(), expected.softmax(-1), rtol=1e-4, atol=2e-5)
        run.verify(step, proposal, accepted, [randomness.randrange(13) for _ in LENGTHS])


def expected_logits(
    target: Any, texts: list[list[int]], reference: Any, proposal: Any, ids: torch.Tensor | None
) -> torch.Tensor:
    """Logits [rows, n, V] of the reference for the proposed tokens."""
    features = heads.features_of(target, [text[:-1] for text in texts])
    rows = zip(features, texts, proposal.tokens.tolist(), strict=True)
    return torch.stack([reference.drafts(own, text, drafts, ids) for own, text, drafts in rows])


@pytest.fixture
def start(bench: Any) -> Callable[..., Any]:
    def build(stub: Any, algorithm: str, draft: str | None = None, count: int = 3, chunk: int = 5, **asked: Any) -> Any:
        randomness = random.Random(count)
        here = bench([[randomness.randrange(13) for _ in range(length)] for length in LENGTHS])
        run = heads.Run(here, stub, algorithm, count, draft, **asked)
        run.prefill(chunk)
        return run

    return build


# -- EAGLE -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "chunk"), first_quick(1, [(3, 3), (1, 1000), (4, 7), (2, 1)]))
def test_eagle_matches_reference(write: Any, start: Any, count: int, chunk: int) -> None:
    """Without a theta of its own a head uses 10000, whatever its target's is; a missing bias is none."""
    stub, tensors = heads.TargetStub(2), heads.eagle(bias=False)
    run = start(stub, "eagle", write(heads.llama(architectures=["LlamaForCausalLMEagle"]), tensors), count, chunk)
    check(run, heads.RefEagle(tensors, stub), turns=7)
    assert any("rope theta 10000 (from class default), the target's theta is 77" in line for line in run.lines)


def test_non_finite_weights_are_refused(write: Any, start: Any) -> None:
    tensors = heads.eagle()
    tensors["fc.weight"][3, 2] = torch.inf
    with pytest.raises(SpecbatchError, match=r"^draft='fc.weight': .*not finite"):
        start(heads.TargetStub(2), "eagle", write(heads.llama(), tensors), 2, 3)


THETAS = [{"rope_theta": 500.0}, {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}}]


@pytest.mark.parametrize(("stored", "spelling"), crossed([{}, {"binary": True}, {"prefix": "model."}], THETAS))
def test_eagle_config_spellings(write: Any, start: Any, spelling: Any, stored: Any) -> None:
    """With an embedding and biases of its own."""
    stub, tensors = heads.TargetStub(2), heads.eagle(own=True)
    sizes = {"q": heads.HEADS * heads.DIM, "k": heads.KV * heads.DIM, "v": heads.KV * heads.DIM}
    biases = {f"layer.self_attn.{part}_proj.bias": (size,) for part, size in sizes.items()}
    tensors |= heads.randomise(biases, 9)
    run = start(stub, "eagle", write(heads.llama(**spelling), tensors, **stored))
    check(run, heads.RefEagle(tensors, stub, theta=500.0))


def test_requested_theta_overrides_the_config(write: Any, start: Any) -> None:
    stub, tensors = heads.TargetStub(2), heads.eagle()
    run = start(stub, "eagle", write(heads.llama(rope_theta=500.0), tensors), draft_rope_theta=30.0)
    check(run, heads.RefEagle(tensors, stub, theta=30.0))
    assert any("rope theta 30 (from draft_rope_theta)" in line for line in run.lines)


# -- EAGLE-3 -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "chunk"), first_quick(1, [(4, 7), (1, 1000), (3, 3), (2, 1)]))
def test_eagle3_matches_reference(write: Any, start: Any, count: int, chunk: int) -> None:
    """SafeAILab's format: midlayer, a reduced vocabulary, no theta, the default layers."""
    stub, tensors = heads.TargetStub(8), heads.eagle3()
    config = heads.llama(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=9)
    run = start(stub, "eagle3", write(config, tensors, "midlayer"), count, chunk)
    check(run, heads.RefEagle3(tensors, stub), (2, 4, 5), heads.ids(tensors), turns=7)
    assert any(
        "inputs of layers 2, 4, 5 of 8 (from aux_layers=[2, 4, 5], the default: its config lists none)" in line
        for line in run.lines
    )
    assert any("rope theta 10000 (from class default), the target's theta is 77" in line for line in run.lines)
    assert any("drafts 9 of the target's 13 tokens" in line for line in run.lines)


NESTED = [([1, 3, 5], (2, 4, 6)), ([2, 3, 5], (2, 3, 5)), ([], (2, 4, 5))]


@pytest.mark.parametrize(("listed", "boundaries", "rope"), crossed(NESTED, THETAS))
def test_eagle3_in_specforge_format(
    write: Any, start: Any, rope: Any, listed: list[int], boundaries: tuple[int, ...]
) -> None:
    """Layers in eagle_config are outputs if the first is 1, else inputs; names have a prefix; all tokens are drafted,
    through the target's matrix."""
    stub, tensors = heads.TargetStub(8), heads.eagle3(known=None, more={"fc.bias": heads.HIDDEN})
    tensors |= heads.randomise({"embed_tokens.weight": (13, heads.HIDDEN)}, 8)
    nested = {"eagle_aux_hidden_state_layer_ids": listed, "use_aux_hidden_state": True}
    config = heads.llama(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=None, eagle_config=nested, **rope)
    run = start(stub, "eagle3", write(config, tensors, "midlayer", prefix="model."))
    check(run, heads.RefEagle3(tensors, stub, theta=500.0), boundaries)


@pytest.mark.parametrize(("before", "rope"), crossed([True, False, None], THETAS))
def test_eagle3_in_speculators_format(write: Any, start: Any, rope: Any, before: bool | None) -> None:
    """A Qwen3 layer, described in a nested config; layers at the top are inputs, 6 of 6 that of the final norm."""
    more = {f"layer.self_attn.{part}_norm.weight": 12 for part in "qk"}
    stub, tensors = heads.TargetStub(6), heads.eagle3(known=9, dim=12, more=more)
    config = {
        "speculators_model_type": "eagle3",
        "transformer_layer_config": heads.llama(architectures=None, model_type="qwen3", head_dim=12, **rope),
        "draft_vocab_size": 9,
        "eagle_aux_hidden_state_layer_ids": [1, 3, 6],
        "norm_before_residual": before,
    }
    run = start(stub, "eagle3", write(config, tensors))
    reference = heads.RefEagle3(tensors, stub, theta=500.0, norm_before_residual=bool(before))
    check(run, reference, (1, 3, 6), heads.ids(tensors))
    assert any("lacks norm_before_residual" in line for line in run.lines) == (before is None)


NORM_OF_EACH = {f"fc_norm.{n}.weight": 24 for n in range(3)}
LEGACY = {f"fc_norm.{n}": f"aux_norm_{name}" for n, name in enumerate(("low", "mid", "high"))}
# Vectors of the head, its config, how it is stored, options of the reference.
NORMS: dict[str, tuple[dict[str, int], dict[str, bool], dict[str, Any], dict[str, bool]]] = {
    "before and after fc": (
        {"input_norm.weight": 72}, {"norm_before_fc": True, "norm_output": True}, {}, {"norm_output": True}
    ),
    "of each feature": (NORM_OF_EACH, {"fc_norm": True}, {"stem": "midlayer"}, {}),
    "of each feature, old names": (NORM_OF_EACH, {}, {"stem": "midlayer", "rename": LEGACY, "binary": True}, {}),
}  # fmt: skip


@pytest.mark.parametrize("norms", NORMS)
def test_eagle3_with_norms_around_fc(write: Any, start: Any, norms: str) -> None:
    more, described, stored, options = NORMS[norms]
    stub, tensors = heads.TargetStub(8), heads.eagle3(more=more)
    run = start(stub, "eagle3", write(heads.llama(draft_vocab_size=9) | described, tensors, **stored))
    check(run, heads.RefEagle3(tensors, stub, **options), (2, 4, 5), heads.ids(tensors))


@pytest.mark.parametrize(
    ("value", "line"),
    [
        (True, "norm_output: true is read as in vLLM; SpecForge up to 0.2.0 trains such a head as if this were false"),
        (False, "norm_output: false is read as in vLLM; SpecForge up to 0.2.0 trains such a head without a norm"),
        (None, None),
    ],
)
def test_norm_output_that_specforge_trains_otherwise_is_reported(
    write: Any, start: Any, value: bool | None, line: str | None
) -> None:
    stub, tensors = heads.TargetStub(8), heads.eagle3()
    run = start(stub, "eagle3", write(heads.llama(draft_vocab_size=9, norm_output=value), tensors))
    check(run, heads.RefEagle3(tensors, stub, norm_output=bool(value)), (2, 4, 5), heads.ids(tensors))
    found = [text for text in run.lines if "SpecForge" in text]
    assert len(found) == (line is not None)
    assert line is None or line in found[0]


def test_eagle3_narrower_than_its_target_reads_the_requested_layers(write: Any, start: Any) -> None:
    """With matrices of its own a head may have another hidden size; aux_layers override its config."""
    stub, tensors = heads.TargetStub(8), heads.eagle3(hidden=16)
    tensors |= heads.randomise({"embed_tokens.weight": (13, 16)}, 8)
    listed = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    config = heads.llama(draft_vocab_size=9, hidden_size=16, target_hidden_size=heads.HIDDEN, **listed)
    run = start(stub, "eagle3", write(config, tensors), aux_layers=(7, 2, 8))
    check(run, heads.RefEagle3(tensors, stub), (7, 2, 8), heads.ids(tensors))


MORE = [("eagle", 2, 4, 7), ("eagle3", 3, 3, 3), ("eagle3", 2, 1, 1000), ("eagle", 3, 2, 1)]


@pytest.mark.parametrize(("algorithm", "layers", "count", "chunk"), first_quick(2, MORE))
def test_more_layers_match_reference(
    write: Any, start: Any, algorithm: str, layers: int, count: int, chunk: int
) -> None:
    """The layers after the first are plain ones; a prompt's chunks attend to those before them."""
    stub, folder, reference, ids = heads.usual(f"{algorithm} of {layers}", write)
    run = start(stub, algorithm, folder, count, chunk)
    check(run, reference, (2, 4, 5), ids, turns=7)
    assert run.plan.kv_layers == layers
    assert any(f", {layers} layers" in line for line in run.lines)


def test_more_layers_in_speculators_format(write: Any, start: Any) -> None:
    """Norms of q and k in all layers; the output is normed after the last."""
    more = {f"layer.self_attn.{part}_norm.weight": 12 for part in "qk"}
    stub, tensors = heads.TargetStub(6), heads.eagle3(known=9, dim=12, more=more) | heads.further(2, dim=12)
    tensors |= heads.randomise({f"layers.1.self_attn.{part}_norm.weight": (12,) for part in "qk"}, 11)
    config = {
        "speculators_model_type": "eagle3",
        "transformer_layer_config": heads.llama(
            architectures=None, model_type="qwen3", head_dim=12, num_hidden_layers=2, rope_theta=500.0
        ),
        "draft_vocab_size": 9, "eagle_aux_hidden_state_layer_ids": [1, 3, 6], "norm_output": True,
    }  # fmt: skip
    run = start(stub, "eagle3", write(config, tensors))
    check(run, heads.RefEagle3(tensors, stub, theta=500.0, norm_output=True), (1, 3, 6), heads.ids(tensors))
    assert not any("SpecForge" in line for line in run.lines)


# -- P-EAGLE -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layers", "count", "chunk"), first_quick(2, [(2, 4, 7), (1, 3, 3), (2, 1, 1000), (4, 2, 1)]))
def test_peagle_matches_reference(write: Any, start: Any, layers: int, count: int, chunk: int) -> None:
    stub, folder, reference, ids = heads.usual(f"peagle of {layers}", write)
    check(start(stub, "peagle", folder, count, chunk), reference, (2, 4, 5), ids, turns=7)


SPELLINGS = [{"mask_token_id": 11}, {"pard_token": 11}, {"dflash_config": {"mask_token_id": 11}}]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_peagle_in_speculators_format(write: Any, start: Any, spelling: dict[str, Any]) -> None:
    """With an embedding of its own, and norms of the features that also apply to those of masked places."""
    stub, tensors = heads.TargetStub(6), heads.peagle(more={"input_norm.weight": 72})
    tensors |= heads.randomise({"embed_tokens.weight": (13, heads.HIDDEN)}, 8)
    config = spelling | {
        "speculators_model_type": "peagle", "transformer_layer_config": heads.llama(rope_theta=500.0),
        "draft_vocab_size": 9, "eagle_aux_hidden_state_layer_ids": [1, 3, 6], "norm_before_fc": True,
    }  # fmt: skip
    run = start(stub, "peagle", write(config, tensors))
    check(run, heads.RefPeagle(tensors, stub, theta=500.0), (1, 3, 6), heads.ids(tensors))


# -- MTP ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("turning", "count", "chunk"), crossed([8, 4, 2], [(4, 7), (1, 1000), (3, 3)]))
def test_mtp_matches_reference(start: Any, count: int, chunk: int, turning: int) -> None:
    """The rope is the target's; here a part of each head may be rotated in the head alone."""
    tensors = heads.mtp()
    stub = heads.TargetStub(2, mtp=heads.stored(tensors))
    whole, plain = stub.config, stub.model()
    stub.config = replace(whole, rope=replace(whole.rope, rotary_dim=turning))
    stub.model = lambda: plain
    reference = heads.RefMtp(tensors, stub, theta=77.0, turning=turning)
    check(start(stub, "mtp", None, count, chunk), reference, turns=7 if count == 4 else 2)


@pytest.mark.parametrize("experts", [None, "each", "fused"])
def test_mtp_of_a_moe_target(start: Any, experts: str | None) -> None:
    """The head's own MLP may be dense."""
    tensors = heads.mtp(experts)
    stub = heads.TargetStub(2, mtp=heads.stored(tensors))
    plain = stub.model()
    stub.config, stub.model = ModelConfig.from_dict(heads.qwen3_next()), lambda: plain
    check(start(stub, "mtp", None, 3, 7), heads.RefMtp(tensors, stub, theta=77.0, turning=4))


@pytest.mark.parametrize(("layers", "count", "chunk"), first_quick(2, [(3, 3, 2), (2, 2, 1000), (4, 4, 7), (4, 3, 1)]))
def test_mtp_with_a_layer_per_draft_matches_reference(
    write: Any, start: Any, layers: int, count: int, chunk: int
) -> None:
    """Layers after the last draft are not loaded."""
    stub, _, reference, _ = heads.usual(f"mtp of {layers}", write)
    run = start(stub, "mtp", None, count, chunk)
    check(run, reference, turns=7)
    assert run.plan.kv_layers == count
    assert any(f"{count} of {layers} layers, one for each draft" in line for line in run.lines)


# -- all ---------------------------------------------------------------------------------------------------------


ALGORITHMS = ("eagle", "eagle3", "mtp", "mtp of 3", "eagle of 2", "eagle3 of 3", "peagle", "peagle of 2")


@pytest.fixture
def usual(write: Any, start: Any) -> Callable[[str], tuple[Any, Any, Any]]:
    """A run of an algorithm's usual head, its reference, and the tokens that it drafts."""

    def build(algorithm: str) -> tuple[Any, Any, Any]:
        stub, folder, reference, ids = heads.usual(algorithm, write)
        return start(stub, algorithm.split()[0], folder), reference, ids

    return build


@pytest.mark.parametrize("algorithm", slow_but(("eagle of 2", "eagle3", "mtp", "peagle of 2"), ALGORITHMS))
def test_greedy_drafts_are_argmax_as_the_batch_changes(usual: Any, algorithm: str) -> None:
    (run, reference, ids), randomness = usual(algorithm), random.Random(3)
    here = run.here
    while len(here.texts) > 1:
        step = here.step(3)
        proposal = run.drafter.propose(step)
        assert proposal.probabilities is None
        expected = expected_logits(run.target, here.texts, reference, proposal, ids)
        assert proposal.tokens.tolist() == expected.argmax(-1).tolist()
        accepted = [randomness.randint(0, 3) for _ in here.texts]
        run.verify(step, proposal, accepted, [1] * len(here.texts))
        order = randomness.sample(range(len(here.texts)), len(here.texts) - 1)
        here.rows, here.texts = here.rows[order], [here.texts[index] for index in order]


@pytest.mark.parametrize("algorithm", slow_but(("eagle", "eagle3 of 3", "mtp of 3", "peagle"), ALGORITHMS))
def test_draft_length_may_change_every_step(usual: Any, algorithm: str) -> None:
    """Zero, one after zero, fewer than before: the head's cache has no gaps, and each distribution is right."""
    (run, reference, ids), randomness = usual(algorithm), random.Random(1)
    before = run.count
    for count in (0, 0, 3, 0, 1, 3, 1, 1, 2, 0, 3):
        step = run.here.step(count, temperature=1.0)
        if count < before:
            run.drafter.shorten(step)
        proposal = run.drafter.propose(step)
        assert proposal.tokens.shape == (len(LENGTHS), count)
        assert proposal.drafted.tolist() == [count] * len(LENGTHS)
        if count:
            expected = expected_logits(run.target, run.here.texts, reference, proposal, ids)
            torch.testing.assert_close(proposal.probabilities.double(), expected.softmax(-1), rtol=1e-4, atol=2e-5)
        run.count = before = count
        accepted = [randomness.randint(0, count) for _ in LENGTHS]
        run.verify(step, proposal, accepted, [randomness.randrange(13) for _ in LENGTHS])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_sampled_drafts_use_the_random_numbers_of_their_positions(usual: Any, algorithm: str) -> None:
    run, _, ids = usual(algorithm)
    step = run.here.step(3, temperature=torch.tensor([1.0, 0.0, 0.7, 1.5, 0.0, 1.0]), top_k=torch.full((6,), 4))
    proposal = run.drafter.propose(step)
    assert proposal.probabilities.dtype == torch.float32
    assert ((proposal.probabilities > 0).sum(-1) <= 4).all()
    for index, text in enumerate(run.here.texts):
        for place in range(3):
            distribution = proposal.probabilities[index, place]
            key = verify_keys(torch.tensor(len(text) + place), step.lengths[index])
            number = uniform_ref(step.sampling.seeds[index], key, DRAFT)
            # Sampled among the tokens of the head's vocabulary, in their order.
            known = distribution if ids is None else distribution[ids]
            drawn = sample_ref(known, number)
            assert proposal.tokens[index, place] == (drawn if ids is None else ids[drawn])
