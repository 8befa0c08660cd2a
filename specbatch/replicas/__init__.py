"""Data parallelism: replicas of an engine, as processes of this machine or on a Ray cluster, with one queue."""
