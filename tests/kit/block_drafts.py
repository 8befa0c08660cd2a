"""Block drafts: a float64 reference of DFlash, and a drafter over rows of a batch with random features."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from specbatch.drafters.dflash import DFlashDrafter
from specbatch.models.decoder import Decoder, Features
from specbatch.models.heads.dflash import DFlash, DFlashConfig
from specbatch.models.weight_reader import Reader
from specbatch.models.weight_shapes import tensor_shapes

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


class Reference:
    """Hidden states and logits of a block in float64: no cache, nothing fused, the config's raw keys.

    predecessor: the token before the anchor, which some drafts read
    """

    predecessor = 0

    def __init__(self, config: dict[str, Any], tensors: dict[str, torch.Tensor], target: Decoder) -> None:
        self.config = config | config["dflash_config"]
        self.tensors = {name: value.double() for name, value in tensors.items()}
        self.embedding = target.embedding.double()
        self.target = target

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.tensors[f"{name}.weight"], self.config["rms_norm_eps"])

    def project(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def convolved(self, x: torch.Tensor, read: torch.Tensor, name: str, side: int) -> torch.Tensor:
        """The input (side 0) or output of a part of a layer, whose normed input is `read`."""
        return x

    def hidden(self, features: torch.Tensor, anchor: int, count: int) -> torch.Tensor:
        """After the last norm, of the anchor and `count` masks; features [start, n * H] of all positions before."""
        config, start = self.config, len(features)
        heads, dim = config["num_attention_heads"], config["head_dim"]
        inverse = config["rope_theta"] ** -(torch.arange(0, dim, 2).double() / dim)
        place = torch.arange(start + count + 1)
        angle = torch.outer(place.double(), inverse).repeat(1, 2)[:, None]

        def turned(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
            half = torch.cat([-x[..., dim // 2 :], x[..., : dim // 2]], -1)
            return x * angle.cos() + half * angle.sin()

        context = self.norm(self.project(features.double(), "fc"), "hidden_norm")
        x = self.embedding[[anchor] + [config["mask_token_id"]] * count]
        for index in range(config["num_hidden_layers"]):
            layer = f"layers.{index}"
            read = self.norm(x, f"{layer}.input_layernorm")
            own = self.convolved(read, read, f"{layer}.attention_conv", 0)
            given = torch.cat([context, own])
            q, k, v = (
                self.project(of, f"{layer}.self_attn.{part}_proj").view(len(of), -1, dim)
                for part, of in (("q", own), ("k", given), ("v", given))
            )
            q = turned(self.norm(q, f"{layer}.self_attn.q_norm"), angle[start:])
            k = turned(self.norm(k, f"{layer}.self_attn.k_norm"), angle)
            k, v = (item.repeat_interleave(heads // item.shape[1], 1) for item in (k, v))
            distance = place[start:, None] - place
            slides = config.get("layer_types", ["full_attention"] * 9)[index] == "sliding_attention"
            seen = torch.ones_like(distance, dtype=torch.bool)
            if config.get("is_causal", slides):
                seen &= distance >= 0
            if slides:
                seen &= distance.abs() < config["sliding_window"]
            scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(dim)
            weight = scores.masked_fill(~seen, -math.inf).softmax(-1)
            mixed = self.project(torch.einsum("hqk,khd->qhd", weight, v).flatten(1), f"{layer}.self_attn.o_proj")
            x = x + self.convolved(mixed, read, f"{layer}.attention_conv", 1)
            read = self.norm(x, f"{layer}.post_attention_layernorm")
            own = self.convolved(read, read, f"{layer}.mlp_conv", 0)
            inner = F.silu(self.project(own, f"{layer}.mlp.gate_proj")) * self.project(own, f"{layer}.mlp.up_proj")
            x = x + self.convolved(self.project(inner, f"{layer}.mlp.down_proj"), read, f"{layer}.mlp_conv", 1)
        return self.norm(x, "norm")

    def logits(self, features: torch.Tensor, anchor: int, count: int, drafts: Sequence[int]) -> torch.Tensor:
        """[len(drafts), V] of the first drafts, each given those before it, in a pass that makes `count` drafts."""
        return self.target.logits(self.hidden(features, anchor, count)[1:].float()).double()[: len(drafts)]


def convolved_by_rows(reference: Reference, x: torch.Tensor, read: torch.Tensor, name: str, side: int) -> torch.Tensor:
    """The convolution of DFlash 2, row by row and channel by channel; see `Reference.convolved`."""
    size, group = reference.config["conv_kernel_size"], reference.config["conv_group_size"]
    base = reference.tensors[f"{name}.base_kernel"][side]
    kernels = reference.project(read, f"{name}.kernel_projection").view(len(x), 2, size, -1)[:, side]
    out = torch.zeros_like(x)
    for row in range(len(x)):
        for back in range(min(size, row + 1)):
            out[row] += (base[back] + kernels[row, back].repeat_interleave(group)) * x[row - back]
    return out


def random_draft(config: DFlashConfig, seed: int = 5) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * 1.5 / math.sqrt(shape[-1])
        if len(shape) > 1
        else torch.rand(shape, generator=generator) + (-0.5 if name.endswith("bias") else 0.5)
        for name, shape in tensor_shapes(config).items()
    }


class Run:
    """Rows of a batch with random features at their verified positions, after a prefill in chunks: a drafter and its
    reference."""

    reference: type[Reference] = Reference
    config: type[DFlashConfig] = DFlashConfig
    network: type[DFlash] = DFlash
    drafter: type[DFlashDrafter] = DFlashDrafter

    def __init__(
        self, bench: Any, tiny: Any, raw: dict[str, Any], count: int, chunk: int, known: Sequence[int] = ()
    ) -> None:
        """raw: the config; known: the tokens that it can draft, all if empty."""
        self.random = random.Random(count)
        config = self.config.from_dict(raw)
        target = tiny(VOCABULARY, layers=LAYERS)
        self.count = count
        self.here = bench([[self.random.randrange(VOCABULARY) for _ in range(size)] for size in LENGTHS])
        self.unknown = torch.tensor([bool(known) and token not in known for token in range(VOCABULARY)])
        if known:
            config = replace(config, draft_vocab=len(known))
        tensors = random_draft(config)
        if known:
            tensors["d2t"] = torch.tensor(known) - torch.arange(len(known))
            tensors["lm_head.weight"] = target.logits(torch.eye(HIDDEN)).T[list(known)]
        cache = self.here.cache_of(config, config.num_layers)
        cache.keys.fill_(1e4), cache.values.fill_(1e4)  # stale entries must not be attended to
        read = Reader(config.with_drafts(count), tensors.__getitem__, torch.float32, torch.device("cpu"), of_draft=True)
        self.by_reference = self.reference(raw, tensors, target)
        self.drafts = self.drafter(self.network(read, target, 256), cache, count)
        self.drafts.reserve(int(self.here.rows.max()) + 1)
        self.features = torch.randn(len(LENGTHS), 128, 2 * HIDDEN, generator=torch.Generator().manual_seed(9))
        self.prefill(chunk)

    def prefill(self, chunk: int) -> None:
        drafter, rows = self.drafts, self.here.rows.tolist()

        class Fed:
            def prefill(_, batch: Any, metadata: Any, features: Features) -> None:
                places = [rows.index(row) for row in metadata.slots.tolist()]
                drafter.prefill(batch, metadata, Features(features.last, self.features[places, metadata.positions]))

        self.here.prefill(Fed(), chunk)

    def all_logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [B, n, V] of drafts [B, n], each given those before it, by the reference."""
        found = []
        for own, text, drafts in zip(self.features, self.here.texts, tokens.tolist(), strict=True):
            self.by_reference.predecessor = text[-2]
            found.append(self.by_reference.logits(own[: len(text) - 1], text[-1], self.count, drafts))
        return torch.stack(found).masked_fill(self.unknown, -math.inf)

    def step(self, accepted: list[int], count: int | None = None) -> float:
        """One iteration of `count` drafts, or of all; the largest error of a probability."""
        count = self.count if count is None else count
        step = self.here.step(count, spare=self.random.choice([0, 5]) + self.count - count, temperature=1.0)
        proposal = self.drafts.propose(step)
        assert proposal.tokens.shape == (len(accepted), count)
        assert proposal.drafted.tolist() == [count] * len(accepted)
        error = torch.zeros(())
        if count:
            expected = self.all_logits(proposal.tokens).softmax(-1)
            error = (proposal.probabilities.double() - expected).abs().max()
        starts = [len(text) - 1 for text in self.here.texts]
        shown = torch.stack([own[at : at + count + 1] for own, at in zip(self.features, starts, strict=True)])
        wrong = torch.arange(count + 1) > torch.tensor(accepted)[:, None]
        shown = torch.where(wrong[..., None], torch.full_like(shown, 1e3), shown)  # features of rejected tokens
        packed = torch.tensor([[7, number] for number in accepted])
        self.drafts.update(step, Features(torch.empty(0), shown.flatten(0, 1)), packed[:, 1], None)
        self.here.commit(proposal.tokens, accepted, [self.random.randrange(VOCABULARY) for _ in accepted])
        return float(error)

    def worst(self) -> float:
        return max(self.step(accepted) for accepted in self.here.acceptances(self.count, self.random))


def check_greedy_chain(run: Run, margin: float) -> None:
    """Greedy drafts are the argmax of the reference given the drafts before, where it is ahead by `margin`. The number
    of drafts changes every step; the block is filled as a whole."""
    matters = 0
    for count in (5, 0, 2, 5, 1):
        proposal = run.drafts.propose(run.here.step(count, spare=5 - count))
        assert proposal.probabilities is None
        if count:
            logits, others = (run.all_logits(tokens) for tokens in (proposal.tokens, proposal.tokens * 0))
            best = logits.topk(2, -1).values
            clear = best[..., 0] - best[..., 1] > margin
            assert torch.equal(proposal.tokens[clear], logits.argmax(-1)[clear])
            matters += int((others.argmax(-1) != logits.argmax(-1)).sum())
        run.step([run.random.randint(0, count) for _ in LENGTHS], count)
    assert matters > 3, "the drafts before must matter"
