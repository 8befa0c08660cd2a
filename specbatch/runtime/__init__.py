"""Running a model: loading, CUDA graphs, eager and piecewise prefill."""
