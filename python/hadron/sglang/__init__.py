"""Hadron's models under SGLang."""
