"""Evaluations that run twice, with specbatch and with lm-eval's own backend for transformers, and their comparison."""
