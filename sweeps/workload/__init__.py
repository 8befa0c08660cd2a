"""Workloads of a sweep: prompts, lengths, arrivals."""
