"""Release gate: policy, verdict and report."""
