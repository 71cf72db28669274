"""Stands for the architectures that Hadron has no model for. Registered if HADRON_REQUIRE=1 only."""

from hadron.requirement import no_model


def __getattr__(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    raise LookupError(f"HADRON_REQUIRE=1: {no_model(name)}")
