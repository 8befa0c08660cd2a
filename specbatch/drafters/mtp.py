"""MTP, which SGLang calls NEXTN: the target's own draft head, stored beside it; its one layer makes every draft."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from specbatch.drafters.base import DraftPlan
from specbatch.drafters.features import FeatureChain, feature_chain, head_plan
from specbatch.drafters.heads import parameters
from specbatch.errors import refuse
from specbatch.models.decoder import Decoder
from specbatch.models.draft_head import Shapes
from specbatch.models.loader import Loader
from specbatch.models.mtp import Mtp, mtp_config, mtp_shapes
from specbatch.weights.drafts import dummy_draft
from specbatch.weights.folder import MTP, check_tensors

if TYPE_CHECKING:
    from specbatch.config import EngineConfig
    from specbatch.weights import Checkpoint, Log


def plan(target: Checkpoint, config: EngineConfig, log: Log) -> DraftPlan:
    """The tensors `mtp.*` of the target. Raises SpecbatchError where there are none, or others than those of one dense
    layer."""
    layer = mtp_config(target.config)
    wanted = mtp_shapes(layer)
    found = {name.removeprefix(MTP): shape for name, shape in target.mtp.items()}
    if config.load_format == "dummy":
        found = wanted
        read = dummy_draft({}, wanted, config.seed + 1).tensor
    else:
        _check(found, wanted, target.name, config.speculation.algorithm)

        def read(name: str) -> torch.Tensor:
            return target.tensor(f"{MTP}{name}")

    log(
        f"draft: the MTP head of {target.name}, {parameters(found) / 1e6:.1f} M parameters; {layer.num_heads} heads "
        f"({layer.num_kv_heads} KV) of {layer.head_dim}; the target's embedding and output matrix; {layer.rope}"
    )

    def build(model: Decoder, loader: Loader) -> FeatureChain:
        head = Mtp(layer, found, read, model, loader.max_positions)
        return feature_chain(head, loader, config, target.config.vocab_size)

    return head_plan(build, layer, parameters(found), config)


def _check(found: Shapes, wanted: Shapes, target: str, algorithm: str) -> None:
    if not found:
        raise refuse("algorithm", algorithm, f"{target} holds no tensors {MTP}*; use a target that does, or 'eagle3'")
    if any(name.startswith(("layers.0.mlp.experts", "layers.0.mlp.gate.")) for name in found):
        works = f"the head of {target} is a mixture of experts, which is not run yet; use a target with a dense one"
        raise refuse("algorithm", algorithm, works)
    check_tensors(wanted, found, f"{target}, {MTP}*")
