"""Timing helpers and the measured limits of a device."""
