"""Batch jobs over files and data sets of prompts."""
