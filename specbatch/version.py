"""The version of specbatch."""

__version__ = "0.1.0"
