"""MTP (NEXTN in SGLang) drafting: the draft head that is stored with the target; its one layer makes every draft."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from specbatch.drafters.base import DraftPlan
from specbatch.drafters.feature_head import FeatureChain, feature_chain, head_plan
from specbatch.errors import refuse
from specbatch.models.decoder import Decoder
from specbatch.runtime.loader import Loader
from specbatch.weights.dummy import DummyCheckpoint
from specbatch.weights.folder import check_tensors

if TYPE_CHECKING:
    from specbatch.config import EngineConfig
    from specbatch.weights import Checkpoint, Log


def plan(target: Checkpoint, config: EngineConfig, log: Log) -> DraftPlan:
    """The draft is the target's tensors `mtp.*`, or those of the layer after its last one (DeepSeek-V3). Raises
    SpecbatchError if there are none, or if they are not those of one layer in the layout of its family."""
    _check_layers(target, config.speculation.algorithm)
    network = import_module(target.config.mtp_module)
    is_dummy = config.load_format == "dummy"
    if is_dummy:
        layer = network.mtp_config(target.config).stacked()
    else:
        if not target.mtp:
            works = f"{target.name} has no tensors of an MTP head; use a target that has, or 'eagle3'"
            raise refuse("algorithm", config.speculation.algorithm, works)
        found = network.own_tensors(target.config, target.mtp)
        layer = network.mtp_config(target.config, found)
        check_tensors(layer.tensor_shapes(), found, f"{target.name}, its MTP head")
    mlp = f"{layer.mixture.experts} experts" if layer.mixture else "a dense MLP"
    stored = ", FP8" if len(layer.tensor_shapes()) > len(layer.weight_shapes()) else ""
    log(
        f"draft: the MTP head of {target.name}, {layer.parameter_count() / 1e6:.1f} M parameters{stored}; "
        f"{layer.num_heads} heads ({layer.num_kv_heads} KV) of {layer.head_dim}, {mlp}; the target's embedding and "
        f"output matrix; {layer.rope}"
    )

    def build(model: Decoder, loader: Loader) -> FeatureChain:
        read = target.tensor
        if is_dummy:  # generated on its device, as the target's
            device = str(model.device)
            read = DummyCheckpoint(layer, name="mtp", seed=config.seed + 1, tokenizer=None, device=device).tensor
        head = network.Mtp(loader.draft_reader(layer, read), model, loader.max_positions)
        return feature_chain(head, loader, config, target.config.vocab_size)

    return head_plan(build, layer, config, weights=layer)


def _check_layers(target: Checkpoint, algorithm: str) -> None:
    layers = target.config.mtp_layers
    if layers not in (None, 1):
        works = (
            f"the config of {target.name} has a head of {layers!r} layers, and only heads of one layer are supported"
        )
        raise refuse("algorithm", algorithm, f"{works}; use 'eagle3', 'dflash' or 'ngram'")
