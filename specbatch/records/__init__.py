"""Records of runs: metrics, files, statistics."""
