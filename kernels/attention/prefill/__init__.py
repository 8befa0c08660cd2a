"""Attention of prompts."""
