"""A draft model with its own KV cache matches the same model run without a cache on the whole text."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from crossed import crossed
from targets import Targets
from uncached import run_texts

from specbatch import SamplingParams
from specbatch.config.engine_config import EngineConfig
from specbatch.config.speculation import Speculation
from specbatch.drafters.draft_model import DraftModelChain, parse_skip, plan
from specbatch.drafters.draft_vocabulary import OtherVocabulary, SameVocabulary
from specbatch.errors import SpecbatchError
from specbatch.kernels.sampling.filtered_distribution import probabilities_ref
from specbatch.kernels.sampling.rng import DRAFT, uniform_ref, verify_keys
from specbatch.kernels.sampling.sample import sample_ref
from specbatch.models.decoder import Decoder
from specbatch.text.shared_tokens import SharedTokens
from specbatch.text.tokenizer import ByteTokenizer
from specbatch.weights.dummy import DummyCheckpoint
from specbatch.weights.opening import open_checkpoint

VOCABULARY = 13
LENGTHS = (2, 3, 5, 6, 13, 21)


def greedy_chains(model: Decoder, texts: list[list[int]], count: int) -> list[list[int]]:
    longer = [list(text) for text in texts]
    for _ in range(count):
        for text, token in zip(longer, run_texts(model, longer)[0].argmax(-1).tolist(), strict=True):
            text.append(token)
    return [text[-count:] for text in longer]


def prompts(randomness: random.Random) -> list[list[int]]:
    return [[randomness.randrange(VOCABULARY) for _ in range(length)] for length in LENGTHS]


@pytest.mark.parametrize(("count", "chunk"), crossed([4, 2, 1], [3, 4, 1000]))
def test_greedy_chain_matches_uncached_model(bench: Any, tiny: Any, count: int, chunk: int) -> None:
    randomness = random.Random(count)
    model, here = tiny(VOCABULARY), bench(prompts(randomness))
    drafter = DraftModelChain(model, *here.forward_of(model), SameVocabulary(VOCABULARY, model.config.vocab_size))
    here.prefill(drafter, chunk)
    for turn, accepted in enumerate(here.acceptances(count, randomness)):
        proposal = drafter.propose(here.step(count, spare=(0, 6)[turn % 2]))
        assert proposal.probabilities is None
        assert proposal.drafted.tolist() == [count] * len(LENGTHS)
        assert proposal.tokens.tolist() == greedy_chains(model, here.texts, count)
        here.commit(proposal.tokens, accepted, [randomness.randrange(VOCABULARY) for _ in LENGTHS])


def test_cached_keys_match_uncached_model(bench: Any, tiny: Any) -> None:
    """Including the last draft after full acceptance: an argmax would not show a small error in it."""
    randomness = random.Random(7)
    model, here = tiny(VOCABULARY), bench(prompts(randomness))
    forward, cache = here.forward_of(model)
    drafter = DraftModelChain(model, forward, cache, SameVocabulary(VOCABULARY, model.config.vocab_size))
    here.prefill(drafter)
    for accepted in here.acceptances(3, randomness):
        proposal = drafter.propose(here.step(3))
        here.check_keys(model, cache)
        here.commit(proposal.tokens, accepted, [randomness.randrange(VOCABULARY) for _ in LENGTHS])


def test_batch_may_shrink_and_reorder(bench: Any, tiny: Any) -> None:
    randomness = random.Random(3)
    model, here = tiny(VOCABULARY), bench(prompts(randomness))
    drafter = DraftModelChain(model, *here.forward_of(model), SameVocabulary(VOCABULARY, model.config.vocab_size))
    here.prefill(drafter)
    while len(here.texts) > 1:
        proposal = drafter.propose(here.step(2))
        assert proposal.tokens.tolist() == greedy_chains(model, here.texts, 2)
        here.commit(proposal.tokens, [randomness.randint(0, 2) for _ in here.texts], [1] * len(here.texts))
        order = randomness.sample(range(len(here.texts)), len(here.texts) - 1)
        here.rows = here.rows[order]
        here.texts = [here.texts[index] for index in order]


SAMPLING = {
    "temperature": torch.tensor([1.0, 0.0, 0.7, 1.5, 0.0, 1.0]),
    "top_k": torch.tensor([0, 0, 4, 0, 2, 0]),
    "top_p": torch.tensor([1.0, 1.0, 1.0, 0.8, 0.5, 1.0]),
    "min_p": torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.1]),
}


@pytest.mark.parametrize("truncated", [False, True])
def test_sampled_drafts_follow_the_reported_distribution(bench: Any, tiny: Any, truncated: bool) -> None:
    """q matches the uncached model at the row's own temperature and truncation, and each draft is sampled
    from it with the random number of its own position."""
    randomness = random.Random(11)
    count, model, here = 3, tiny(VOCABULARY), bench(prompts(randomness))
    drafter = DraftModelChain(model, *here.forward_of(model), SameVocabulary(VOCABULARY, model.config.vocab_size))
    here.prefill(drafter)
    setting = SAMPLING if truncated else {"temperature": SAMPLING["temperature"]}
    for accepted in here.acceptances(count, randomness):
        step = here.step(count, **setting)
        proposal = drafter.propose(step)
        q = proposal.probabilities
        assert q is not None
        assert q.shape == (len(LENGTHS), count, VOCABULARY)
        assert q.dtype == torch.float32
        for place in range(count):
            longer = [text + drafts[:place] for text, drafts in zip(here.texts, proposal.tokens.tolist(), strict=True)]
            expected = probabilities_ref(run_texts(model, longer)[0], *setting.values())
            torch.testing.assert_close(q[:, place], expected, rtol=0, atol=1e-5)
            for index, text in enumerate(longer):
                key = verify_keys(torch.tensor(len(text)), step.lengths[index])
                number = uniform_ref(step.sampling.seeds[index], key, DRAFT)
                assert proposal.tokens[index, place] == sample_ref(q[index, place], number)
        greedy = [here.texts[1], here.texts[4]]
        assert proposal.tokens[[1, 4]].tolist() == greedy_chains(model, greedy, count)
        here.commit(proposal.tokens, accepted, [randomness.randrange(VOCABULARY) for _ in LENGTHS])


@pytest.mark.parametrize(("temperature", "vocabulary"), crossed([1.0, 0.0, 1e38], [9, 20, 13]))
def test_draft_of_another_vocabulary_drafts_the_targets_tokens(
    bench: Any, tiny: Any, vocabulary: int, temperature: float
) -> None:
    """`vocabulary` is the draft's. Tokens outside the target's are never drafted; tokens outside the draft's have
    probability 0."""
    model = tiny(vocabulary)
    here = bench([[text % min(vocabulary, 13) for text in range(length)] for length in LENGTHS])
    drafter = DraftModelChain(model, *here.forward_of(model), SameVocabulary(VOCABULARY, model.config.vocab_size))
    here.prefill(drafter)
    for _ in range(3):
        proposal = drafter.propose(here.step(3, temperature=temperature))
        assert proposal.tokens.max() < min(vocabulary, VOCABULARY)
        if temperature:
            q = proposal.probabilities
            assert q is not None
            assert q.shape[-1] == VOCABULARY
            assert not q[..., vocabulary:].any()
            torch.testing.assert_close(q.sum(-1), torch.ones(len(LENGTHS), 3))
            expected = (run_texts(model, here.texts)[0][:, :VOCABULARY] / temperature).softmax(-1)
            torch.testing.assert_close(q[:, 0, : expected.shape[1]], expected, rtol=0, atol=1e-5)
        here.commit(proposal.tokens, [3] * len(LENGTHS), [0] * len(LENGTHS))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_outside_the_draft_vocabulary_are_handled(bench: Any, tiny: Any, temperature: float) -> None:
    """Rows past a target's vocabulary are padding, but the target may still select one."""
    model, known = tiny(9), 9
    here = bench([[VOCABULARY - 1] * length for length in LENGTHS])
    drafter = DraftModelChain(model, *here.forward_of(model), SameVocabulary(VOCABULARY, model.config.vocab_size))
    here.prefill(drafter)
    for _ in range(3):
        proposal = drafter.propose(here.step(3, temperature=temperature))
        assert proposal.tokens.max() < known
        if not temperature:
            read = [[min(token, known - 1) for token in text] for text in here.texts]
            assert proposal.tokens.tolist() == greedy_chains(model, read, 3)
        here.commit(proposal.tokens, [3] * len(LENGTHS), [VOCABULARY - 1] * len(LENGTHS))


# The draft has 11 tokens and the target 13. Five are shared, and each of the target's is read as one of the draft's.
SHARED = SharedTokens([0, 7, 3, 10, 5], [12, 4, 0, 9, 1], [3, 5, 5, 0, 7, 7, 1, 2, 9, 10, 10, 3, 0])


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_of_another_tokenizer_are_shared_tokens(bench: Any, tiny: Any, temperature: float) -> None:
    """Drafts and their distributions are those of the draft's logits of the shared tokens, after the text as the draft
    reads it."""
    randomness = random.Random(5)
    model, here, count = tiny(11), bench(prompts(randomness)), 3
    words = OtherVocabulary(VOCABULARY, 11, SHARED, torch.device("cpu"))
    drafter = DraftModelChain(model, *here.forward_of(model), words)
    here.prefill(drafter, 4)
    for accepted in here.acceptances(count, randomness):
        proposal = drafter.propose(here.step(count, temperature=temperature))
        for place in range(count):
            texts = [text + drafts[:place] for text, drafts in zip(here.texts, proposal.tokens.tolist(), strict=True)]
            logits = run_texts(model, [[SHARED.known[token] for token in text] for text in texts])[0][:, SHARED.draft]
            if temperature:
                assert proposal.probabilities is not None
                expected = torch.zeros(len(LENGTHS), VOCABULARY)
                expected[:, SHARED.target] = (logits / temperature).softmax(-1)
                torch.testing.assert_close(proposal.probabilities[:, place], expected, rtol=0, atol=1e-5)
                assert expected.gather(1, proposal.tokens[:, place, None]).min() > 0
            else:
                assert proposal.tokens[:, place].tolist() == [SHARED.target[at] for at in logits.argmax(-1).tolist()]
        here.commit(proposal.tokens, accepted, [randomness.randrange(VOCABULARY) for _ in LENGTHS])


def test_tokens_that_a_model_lacks_are_not_shared() -> None:
    words = OtherVocabulary(3, 4, SharedTokens([1, 5, 2], [0, 1, 7], [1, 5, 0, 2, 2]), torch.device("cpu"))
    assert words.ids is not None
    assert words.ids.tolist() == [0]
    assert words.read(torch.tensor([0, 1, 2])).tolist() == [1, 0, 0]


def test_skipped_layers_are_inclusive_ranges() -> None:
    assert parse_skip("self:skip=1-2", 4) == {1, 2}
    assert parse_skip("self:skip=0,2-3,2", 4) == {0, 2, 3}


@pytest.mark.parametrize("ranges", ["", "1-", "-1", "2-1,3", "1,9", "1,,2", "0-3", "x"])
def test_skipped_layers_that_are_no_ranges_of_the_model_are_refused(ranges: str) -> None:
    with pytest.raises(SpecbatchError, match=r"^draft='self:skip=.*(FIRST-LAST|layers 0-3)"):
        parse_skip(f"self:skip={ranges}", 4)


def test_layers_whose_keys_others_read_are_not_skipped(targets: Targets) -> None:
    """Layers 2 and 3 of 4 have the keys and values of 0 and 1."""
    with pytest.raises(SpecbatchError, match=r"^draft='self:skip=1': layer 3 attends .* of layer 1; keep that one"):
        targets.engine("gemma4-e2b", "model", more={"draft": "self:skip=1"})
    prompts, params = targets.prompts("gemma4-e2b"), SamplingParams(max_new_tokens=6, ignore_eos=True)
    for skipped in ("2", "0,2"):
        engine = targets.engine("gemma4-e2b", "model", more={"draft": f"self:skip={skipped}"})
        assert [done.token_ids for done in engine.generate(prompts, params)] == targets.greedy("gemma4-e2b", 6)
        assert len(engine.parts.worker.decode_step.drafter.cache.k) == (2 if skipped == "2" else 1)


class Words(ByteTokenizer):
    def vocabulary(self) -> list[str]:
        return [f"word {index}" for index in range(self.vocab_size)]


def test_random_weights_draft_for_a_target_with_a_tokenizer() -> None:
    """--tokenizer is the target's alone, and a draft of random weights has none. Vocabularies must be of one size."""
    config = open_checkpoint("toy", "dummy").config
    target = DummyCheckpoint(config, name="toy", seed=0, tokenizer=Words(config.vocab_size))

    def plan_of(draft: str) -> None:
        speculation = Speculation("standalone", draft=draft)
        plan(target, EngineConfig("toy", load_format="dummy", device="cpu", speculation=speculation), lambda line: None)

    plan_of("toy")
    with pytest.raises(SpecbatchError, match=r"draft='qwen3-8b': its vocabulary is not the target's \(bytes has"):
        plan_of("qwen3-8b")
