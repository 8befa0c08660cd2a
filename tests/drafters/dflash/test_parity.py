"""A block draft with its paged context matches the reference, recomputed from all features at every step."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from crossed import crossed, slow_but

from specbatch.drafters.dflash import DFlashDrafter
from specbatch.kernels.sampling.rng import DRAFT, uniform_ref, verify_keys
from specbatch.kernels.sampling.sample import sample_ref
from specbatch.models.decoder import Decoder, Features
from specbatch.models.dflash import DFlash, DFlashConfig
from specbatch.models.layers import Reader

VOCABULARY, HIDDEN, LAYERS = 13, 24, 4
LENGTHS = (2, 3, 5, 6, 13, 21)
BLOCK = 6
BASE: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "vocab_size": VOCABULARY, "hidden_size": HIDDEN,
    "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 3,
    "head_dim": 10, "max_position_embeddings": 256, "rms_norm_eps": 1e-2, "rope_theta": 70.0,
    "num_target_layers": LAYERS, "block_size": BLOCK,
    "dflash_config": {"mask_token_id": 11, "target_layer_ids": [2, 0]},
}  # fmt: skip
SLIDING = {"sliding_window": 7, "use_sliding_window": True}
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "sliding and full": {**SLIDING, "layer_types": ["sliding_attention", "full_attention"]},
    "narrow": {**SLIDING, "sliding_window": 2, "layer_types": ["full_attention", "sliding_attention"]},
    "sliding, not causal": {**SLIDING, "layer_types": ["sliding_attention"] * 2, "is_causal": False},
    "causal": {"is_causal": True},
    "biases": {"attention_bias": True},
}


def random_draft(config: DFlashConfig, seed: int = 5) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * 1.5 / math.sqrt(shape[-1])
        if len(shape) > 1
        else torch.rand(shape, generator=generator) + 0.5
        for name, shape in config.tensor_shapes().items()
    }


class Run:
    """Rows of a batch with random features at their verified positions, after a prefill in chunks: a drafter and its
    reference."""

    def __init__(
        self, bench: Any, tiny: Any, reference: Any, kind: str, count: int, chunk: int, known: Sequence[int] = ()
    ) -> None:
        """known: the tokens that it can draft; all if empty."""
        self.random = random.Random(count)
        raw = BASE | KINDS[kind]
        config = DFlashConfig.from_dict(raw)
        target = tiny(VOCABULARY, layers=LAYERS)
        tensors = random_draft(config)
        self.count = count
        self.reference = reference(raw, tensors, target)
        self.here = bench([[self.random.randrange(VOCABULARY) for _ in range(size)] for size in LENGTHS])
        self.unknown = torch.tensor([bool(known) and token not in known for token in range(VOCABULARY)])
        if known:
            config = replace(config, draft_vocab=len(known))
            tensors["d2t"] = torch.tensor(known) - torch.arange(len(known))
            tensors["lm_head.weight"] = target.logits(torch.eye(HIDDEN)).T[list(known)]
        cache = self.here.cache_of(config, config.num_layers)
        cache.keys.fill_(1e4), cache.values.fill_(1e4)  # stale entries must not be attended to
        read = Reader(config, tensors.__getitem__, torch.float32, torch.device("cpu"), of_draft=True)
        self.drafter = DFlashDrafter(DFlash(read, target, 256), cache, count)
        self.features = torch.randn(len(LENGTHS), 128, 2 * HIDDEN, generator=torch.Generator().manual_seed(9))
        self.prefill(chunk)

    def prefill(self, chunk: int) -> None:
        drafter, rows = self.drafter, self.here.rows.tolist()

        class Fed:
            def prefill(_, batch: Any, metadata: Any, features: Features) -> None:
                places = [rows.index(row) for row in metadata.slots.tolist()]
                drafter.prefill(batch, metadata, Features(features.last, self.features[places, metadata.positions]))

        self.here.prefill(Fed(), chunk)

    def all_logits(self) -> list[torch.Tensor]:
        """Logits [count, V] of each row, by the reference."""
        return [
            self.reference.logits(own[: len(text) - 1], text[-1], self.count).masked_fill(self.unknown, -math.inf)
            for own, text in zip(self.features, self.here.texts, strict=True)
        ]

    def step(self, accepted: list[int], count: int | None = None) -> float:
        """One iteration of `count` drafts, or of all; the largest error of a probability."""
        count = self.count if count is None else count
        step = self.here.step(count, spare=self.random.choice([0, 5]) + self.count - count, temperature=1.0)
        proposal = self.drafter.propose(step)
        assert proposal.tokens.shape == (len(accepted), count)
        assert proposal.drafted.tolist() == [count] * len(accepted)
        error = torch.zeros(())
        if count:
            expected = torch.stack(self.all_logits()).softmax(-1)[:, :count]
            error = (proposal.probabilities.double() - expected).abs().max()
        starts = [len(text) - 1 for text in self.here.texts]
        shown = torch.stack([own[at : at + count + 1] for own, at in zip(self.features, starts, strict=True)])
        wrong = torch.arange(count + 1) > torch.tensor(accepted)[:, None]
        shown = torch.where(wrong[..., None], torch.full_like(shown, 1e3), shown)  # features of rejected tokens
        packed = torch.tensor([[7, number] for number in accepted])
        self.drafter.update(step, Features(torch.empty(0), shown.flatten(0, 1)), packed[:, 1], None)
        self.here.commit(proposal.tokens, accepted, [self.random.randrange(VOCABULARY) for _ in accepted])
        return float(error)

    def worst(self) -> float:
        return max(self.step(accepted) for accepted in self.here.acceptances(self.count, self.random))


@pytest.fixture
def start(bench: Any, tiny: Any, reference: Any) -> Callable[..., Run]:
    return partial(Run, bench, tiny, reference)


KNOWN = [0, 2, 3, 7, 8, 12]


@pytest.mark.parametrize(("kind", "count", "chunk", "known"), crossed(KINDS, [BLOCK - 1, 2], [1000, 4, 3], [[], KNOWN]))
def test_distributions_match_reference(start: Any, kind: str, count: int, chunk: int, known: Any) -> None:
    assert start(kind, count, chunk, known).worst() < 2e-5


@pytest.mark.parametrize("kind", slow_but(["sliding and full", "causal"], KINDS))
def test_draft_length_may_change_every_step(start: Any, kind: str) -> None:
    """None or the first few of a block, which is filled as a whole."""
    run = start(kind, BLOCK - 1, 4)
    for count in (0, 0, BLOCK - 1, 1, 0, 2, 1, BLOCK - 1, 0, 1):
        assert run.step([run.random.randint(0, count) for _ in LENGTHS], count) < 2e-5


def test_sampled_drafts_use_the_random_numbers_of_their_positions(start: Any) -> None:
    """The random number of a draft depends only on the seed and the positions of draft and root in the text."""
    run = start("sliding and full", BLOCK - 1, 1000)
    step = run.here.step(5, spare=0, temperature=1.0)
    proposal = run.drafter.propose(step)
    for index, text in enumerate(run.here.texts):
        for place in range(5):
            key = verify_keys(torch.tensor(len(text) + place), step.lengths[index])
            number = uniform_ref(step.sampling.seeds[index], key, DRAFT)
            assert proposal.tokens[index, place] == sample_ref(proposal.probabilities[index, place], number)


@pytest.mark.parametrize(("kind", "known"), [("full", []), ("sliding and full", KNOWN)])
def test_greedy_drafts_are_argmax(start: Any, kind: str, known: list[int]) -> None:
    run = start(kind, BLOCK - 1, 7, known)
    for accepted in run.here.acceptances(run.count, run.random):
        proposal = run.drafter.propose(run.here.step(run.count))
        assert proposal.probabilities is None
        for drafts, logits in zip(proposal.tokens, run.all_logits(), strict=True):
            best = logits.topk(2, -1).values
            clear = best[:, 0] - best[:, 1] > 1e-4
            assert clear.double().mean() > 0.5
            assert torch.equal(drafts[clear], logits.argmax(-1)[clear])
        run.step(accepted)


def test_batch_may_shrink_and_reorder(start: Any) -> None:
    run = start("sliding and full", 3, 1000)
    while len(run.here.texts) > 1:
        assert run.step([run.random.randint(0, 3) for _ in run.here.texts]) < 2e-5
        order = run.random.sample(range(len(run.here.texts)), len(run.here.texts) - 1)
        run.here.rows, run.features = run.here.rows[order], run.features[order]
        run.here.texts = [run.here.texts[index] for index in order]


# Other implementations of the same model match the reference.


@pytest.mark.parametrize("start", [1, 9, 30])
def test_reference_matches_transformers(reference: Any, tiny: Any, start: int) -> None:
    """Its DFlash models differ in names and have no causal layers."""
    muse = pytest.importorskip("transformers.models.muse_glimmer_assistant")
    raw = BASE | KINDS["full"]
    tensors = random_draft(DFlashConfig.from_dict(raw))
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    theirs = muse.MuseGlimmerAssistantModel(
        muse.MuseGlimmerAssistantConfig(
            **{key: raw[key] for key in (*keys, "head_dim", "rms_norm_eps", "block_size")},
            rope_parameters={"rope_type": "default", "rope_theta": raw["rope_theta"]},
            layer_types=["full_attention"] * 2,
            target_layer_ids=[2, 0],
        )
    )
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    theirs.load_state_dict({names.get(name, name): value for name, value in tensors.items()})
    same_hidden(
        reference, raw, tensors, tiny(VOCABULARY, layers=LAYERS), start, theirs, "context_hidden_states", "noise_embeds"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_reference_matches_the_authors_package(reference: Any, tiny: Any, kind: str) -> None:
    """pip install --no-deps dflash"""
    authors = pytest.importorskip("dflash.model")
    raw = BASE | KINDS[kind]
    tensors = random_draft(DFlashConfig.from_dict(raw))
    theirs = authors.DFlashDraftModel(authors.Qwen3Config(**raw))
    theirs.load_state_dict(tensors)
    same_hidden(
        reference, raw, tensors, tiny(VOCABULARY, layers=LAYERS), 12, theirs, "target_hidden", "noise_embedding"
    )


@torch.inference_mode()
def same_hidden(
    reference: Any,
    raw: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    target: Decoder,
    start: int,
    theirs: Any,
    context: str,
    block: str,
) -> None:
    features = torch.randn(start, 2 * HIDDEN, generator=torch.Generator().manual_seed(start))
    ours = reference(raw, tensors, target).hidden(features, 3, BLOCK - 1)
    x = target.embedding[[3] + [11] * (BLOCK - 1)]
    found = theirs.eval()(**{context: features[None], block: x[None]}, position_ids=torch.arange(start + BLOCK)[None])
    found = found if isinstance(found, torch.Tensor) else found.last_hidden_state
    torch.testing.assert_close(found[0].double(), ours, rtol=1e-5, atol=2e-5)
