"""Mixture of experts: routing and grouped GEMMs."""
