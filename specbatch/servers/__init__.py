"""Servers of other engines over HTTP, as engines of sweeps, evaluations and checks."""
