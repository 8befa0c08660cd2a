"""Names and shapes of the weights of a model or draft head, and of the tensors that its checkpoint stores."""

from __future__ import annotations

import math
from functools import lru_cache
from importlib import import_module

import torch

from specbatch.models.config import ModelConfig
from specbatch.models.formats.format import Shapes
from specbatch.models.rope_tables import layer_tables
from specbatch.models.shape_recorder import ShapeRecorder


def tensor_shapes(config: ModelConfig) -> Shapes:
    """Name -> shape of every tensor that a checkpoint of this model or draft head must have: a quantized weight may be
    stored as several."""
    shapes, stored = weight_shapes(config), config.quantization
    return shapes if stored is None else stored.stored(shapes, config.unquantized_ends)


def parameter_count(config: ModelConfig) -> int:
    """Number of parameters in memory; tied embeddings count once."""
    return config.copied_parameters + sum(math.prod(shape) for shape in weight_shapes(config).values())


def weight_shapes(config: ModelConfig) -> Shapes:
    """Name -> shape of the weights of a model or draft head; matrices are [out, in]."""
    return shapes_and_matrices(config)[0]


def shapes_and_matrices(config: ModelConfig) -> tuple[Shapes, list[tuple[str, ...]]]:
    """`weight_shapes`, and the names of the weights that form a matrix of a decoder, where they are several."""
    of_head = config.head_shapes()
    if of_head is not None:
        return of_head, []
    read = _recorded(config)
    return read.shapes.copy(), read.joined.copy()


def decoder_shapes(config: ModelConfig) -> Shapes:
    """Name -> shape of the tensors that a decoder of this config reads."""
    return _recorded(config).shapes.copy()


@lru_cache(16)  # start-up asks for the same ones a dozen times, of models with up to 70,000 weights
def _recorded(config: ModelConfig) -> ShapeRecorder:
    """What a decoder of this config reads, from building one without weights."""
    read, family, names = ShapeRecorder(config), import_module(config.module), config.names
    read(names.embedding, config.vocab_size, config.hidden_size)
    tables = layer_tables(config, 1, torch.float32, torch.device("cpu"))
    for index in range(config.num_layers):
        family.layer(read, index, tables[index])
    if config.layer_inputs:
        family.layer_inputs(read)
    family.final_norm(read, names.norm)
    if not config.tie_embeddings:
        read.output_matrix(names.head, config.vocab_size)
    return read
