"""EAGLE-1 and EAGLE-2 drafting: a head of few layers reads the target's last hidden state and the next token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbatch.drafters.base import DraftPlan
from specbatch.drafters.feature_head import FeatureChain, feature_chain, head_plan
from specbatch.drafters.head_checks import check_tensors_of, layer_for_target, usual_head, without_maps
from specbatch.errors import of_draft
from specbatch.models.decoder import Decoder
from specbatch.models.heads.draft_head import layer_config
from specbatch.models.heads.eagle import Eagle, eagle_shapes
from specbatch.runtime.device import find_device
from specbatch.runtime.loader import Loader
from specbatch.weights.draft_heads import dummy_config, dummy_draft, open_draft
from specbatch.weights.folder import check_tensors

if TYPE_CHECKING:
    from specbatch.config.engine_config import EngineConfig
    from specbatch.weights import Checkpoint, Log


def plan(target: Checkpoint, config: EngineConfig, log: Log) -> DraftPlan:
    """The draft is a checkpoint in SafeAILab's format. Raises SpecbatchError if it does not fit the target."""
    asked = config.speculation
    assert asked.draft is not None
    with of_draft(asked.draft):
        if config.load_format == "dummy":
            described = dummy_config(asked.draft) or usual_head(target.config)
            device = str(find_device(config.device))
            files = dummy_draft(described, eagle_shapes(layer_config(described), {}), config.seed + 1, device)
        else:
            files = open_draft(asked.draft)
            check_tensors_of(asked.algorithm, files)
        layer = layer_config(files.config, files.shapes)
    layer = layer_for_target(layer, layer.hidden_size, files, target, asked, log)
    check_tensors(eagle_shapes(layer, files.shapes), files.shapes, files.origin, "draft")

    def build(model: Decoder, loader: Loader) -> FeatureChain:
        read = loader.draft_reader(layer, files.tensor)
        head = Eagle(read.config, read, files.shapes, model, loader.max_positions)
        return feature_chain(head, loader, config, target.config.vocab_size)

    return head_plan(build, layer, config, shapes_of=lambda layer: without_maps(eagle_shapes(layer, files.shapes)))
