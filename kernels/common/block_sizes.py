"""Sizes of the blocks that share a scale in quantized weights and activations; torch-free, for readers of configs."""

SCALE_BLOCK = 128  # FP8: inputs, and outputs of a weight
FP8_MAX = 448.0  # of float8_e4m3fn
MX_BLOCK = 32  # inputs, in MXFP4
NV_BLOCK = 16  # inputs, in NVFP4
CPU_GROUPS = (16, 32, 64, 128)  # inputs, in a `GroupedWeight`
INT4_GROUPS = (32, 64, 128)  # inputs, in INT4
