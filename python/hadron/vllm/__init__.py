"""Hadron's models under vLLM."""
