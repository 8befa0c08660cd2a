"""Tensor parallelism: the processes of the ranks and their messages."""
