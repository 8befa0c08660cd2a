"""Domino drafting: a block is filled in one pass as by DFLASH, then its tokens are chosen one after the other, by a GRU
over them. Chains and trees are those of DSpark, whose recurrent Markov head the GRU takes the place of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbatch.drafters.base import DraftPlan
from specbatch.drafters.dflash import Block, block_plan
from specbatch.drafters.dspark import DSparkDrafter, DSparkTree
from specbatch.models.heads.domino import Domino, DominoConfig, published_shape

if TYPE_CHECKING:
    from specbatch.config.engine_config import EngineConfig
    from specbatch.weights import Checkpoint, Log


def plan(target: Checkpoint, config: EngineConfig, log: Log) -> DraftPlan:
    """The draft is a published checkpoint, or with load_format "dummy" random weights: draft="dummy" has the shape of
    published drafts. Raises SpecbatchError if the draft does not fit the target.
    """
    return block_plan(target, config, log, Block(DominoConfig, Domino, DSparkDrafter, published_shape, DSparkTree))
