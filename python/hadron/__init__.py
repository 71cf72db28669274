"""Hadron's models for other inference servers: vLLM and SGLang load this package through their plug-in entry points."""

__version__ = "0.2.0"

__all__ = ["__version__"]
