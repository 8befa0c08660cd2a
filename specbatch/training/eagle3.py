"""Training of EAGLE-3 heads, in the format of SafeAILab and SpecForge (`LlamaForCausalLMEagle3`).

h = fc(three residual streams of the target, side by side); q, k and v read [norm(embed(t)) ; norm(h)], and attention is
added to h itself. Further layers are plain ones. The output matrix knows the commonest tokens only; `d2t` holds what to
add to a draft's id for the target's, `t2d` which of the target's tokens are known. The embedding is the target's and
not in the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from specbatch.errors import refuse
from specbatch.models.heads.eagle3 import default_aux
from specbatch.training.chain import ChainHead, Memory, through
from specbatch.training.data import Example, frequent
from specbatch.training.head import Layer, layer_keys, plain_heads, require_inner_layers
from specbatch.training.layers import Attention, Mlp, Norm, Rotary, initialize
from specbatch.training.recipe import Recipe
from specbatch.training.target import Target

ARCHITECTURE = "LlamaForCausalLMEagle3"


class MidLayer(Layer):
    hidden_norm: Norm


class Eagle3Head(ChainHead):
    def __init__(
        self,
        target: Target,
        kept: torch.Tensor,
        *,
        steps: int,
        max_len: int,
        seed: int,
        layers: int = 1,
        boundaries: tuple[int, ...] | None = None,
    ) -> None:
        """kept: int64 [Vd], draft vocabulary, ascending; steps: number of unrolled drafts; boundaries: the layers of
        the target whose inputs are read, None: as `feature_boundaries` has them."""
        super().__init__()
        base = target.config
        sizes = replace(base, num_layers=layers, qk_norm=False, **plain_heads(base))
        hidden, eps = base.hidden_size, base.rms_norm_eps
        self.drafts, self.depth = steps, layers
        self.kept = kept.to(target.device)
        self._usual = default_aux(base.depth)
        self._boundaries = boundaries or feature_boundaries(base.depth)
        self.aux = tuple(boundary - 1 for boundary in self._boundaries)
        self._sizes = sizes
        self.fc = nn.Linear(len(self.aux) * hidden, hidden, bias=False)
        self.midlayer = MidLayer(
            Attention(sizes, inputs=2),
            Norm(hidden, eps),
            Norm(hidden, eps),
            Mlp(sizes.hidden_size, sizes.intermediate_size),
        )
        self.midlayer.hidden_norm = Norm(hidden, eps)
        self.layers = nn.ModuleDict(  # by number, as they are named after the first
            {
                str(index): Layer(
                    Attention(sizes),
                    Norm(hidden, eps),
                    Norm(hidden, eps),
                    Mlp(sizes.hidden_size, sizes.intermediate_size),
                )
                for index in range(1, layers)
            }
        )
        self.norm = Norm(hidden, eps)
        self.lm_head = nn.Linear(hidden, len(kept), bias=False)
        initialize(self, seed)
        with torch.no_grad():
            # Initialized to the target's own predictions from its upper layer, so that less is left to learn.
            self.fc.weight[:, -hidden:] += torch.eye(hidden)
            self.norm.weight.copy_(target.norm)
            self.lm_head.weight.copy_(target.head[self.kept])
        self.to(target.device)
        self.rotary = Rotary(sizes, max_len + steps, target.device)

    def begin(self, last: torch.Tensor, aux: torch.Tensor | None) -> torch.Tensor:
        out: torch.Tensor = self.fc(aux)
        return out

    def advance(self, embedded: torch.Tensor, hidden: torch.Tensor, memory: Memory) -> torch.Tensor:
        first = self.midlayer
        read = torch.cat([first.input_layernorm(embedded), first.hidden_norm(hidden)], -1)
        x = through(first, hidden, memory, read=read)
        for index, layer in enumerate(self.layers.values(), 1):
            assert isinstance(layer, Layer)
            x = through(layer, x, memory, index)
        return x

    def predict(self, hidden: torch.Tensor, target: Target) -> torch.Tensor:
        out: torch.Tensor = self.lm_head(self.norm(hidden))
        return out

    def config(self) -> dict[str, Any]:
        described = {
            "architectures": [ARCHITECTURE],
            "model_type": "llama",
            **layer_keys(self._sizes),
            "num_hidden_layers": self.depth,
            "draft_vocab_size": self.lm_head.out_features,
            "target_hidden_size": self._sizes.hidden_size,
        }
        if self._boundaries != self._usual:  # at the top level the key has one meaning, inside eagle_config two
            described["eagle_aux_hidden_state_layer_ids"] = list(self._boundaries)
        return described

    def tensors(self) -> dict[str, torch.Tensor]:
        assert self.kept is not None
        kept = self.kept.cpu()
        known = torch.zeros(self._sizes.vocab_size, dtype=torch.bool)
        known[kept] = True
        named = super().tensors()
        if self.depth > 1:  # as vLLM and speculators name the first of several
            named = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in named.items()}
        return named | {"d2t": kept - torch.arange(len(kept)), "t2d": known}


def untrained_head(recipe: Recipe, target: Target, train: Sequence[Example], spare_tokens: int) -> Eagle3Head:
    """A head whose draft vocabulary is the most frequent tokens of `train`; see `trainer.make_head`."""
    total = target.config.vocab_size
    return Eagle3Head(target, frequent(train, recipe.vocabulary(total), total), **sizes_of(recipe, target))


def sizes_of(recipe: Recipe, target: Target) -> dict[str, Any]:
    """Arguments of a head. Refuses a target without the layers that it reads."""
    require_inner_layers(recipe.algorithm, target)
    depth = target.config.depth
    if recipe.aux_layers is not None and max(recipe.aux_layers) > depth:
        raise refuse("aux_layers", recipe.aux_layers, f"{target.name} has {depth} layers; use 1 to {depth}")
    return {
        "steps": recipe.unroll,
        "max_len": recipe.max_len,
        "seed": recipe.seed,
        "layers": recipe.draft_layers,
        "boundaries": recipe.aux_layers,
    }


def feature_boundaries(layers: int) -> tuple[int, ...]:
    """The default boundaries of all readers, or the lowest three if the target has too few layers: k is the input of
    layer k, or the output of layer k - 1."""
    usual = default_aux(layers)
    return usual if 1 <= usual[0] < usual[1] < usual[2] else tuple(range(1, min(layers, 4)))
