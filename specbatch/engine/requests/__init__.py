"""Requests on the host: submission, prompts, open streams."""
