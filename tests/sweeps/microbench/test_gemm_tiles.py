"""The grids of tiles: what the rules choose is among their kinds, and every tile can be launched."""

from __future__ import annotations

import pytest

from specbatch.kernels.gemm.split_k_triton import COUNTERS, WORKSPACE
from specbatch.sweeps.microbench.gemm import OF_LAYER, SIZES
from specbatch.sweeps.microbench.gemm_tiles import BLOCKS, KINDS, grid, rows_of, rule


@pytest.mark.parametrize("kind", KINDS)
def test_split_tiles_fit_the_workspace_of_partial_sums(kind):
    for name in OF_LAYER:
        for rows in rows_of(kind):
            tiles, chosen = grid(kind, name, rows), rule(kind, name, rows)
            assert {type(tile) for tile in tiles} == {type(chosen)}
            if rows == 1:  # leaves no partial sums
                assert chosen in tiles
                continue
            for tile in tiles:
                width = tile.n if kind == "BF16" else tile.outputs
                height = getattr(tile, "rows", rows)
                programs = -(-SIZES[name][0] // width) * -(-rows // height)
                if tile.splits > 1:
                    assert programs <= COUNTERS
                    assert programs * tile.splits * height * width <= WORKSPACE
                if kind in ("INT4", "FP8"):
                    assert height in BLOCKS[rows]
