"""Refusals: features of a host that Hadron's models do not have. All of them are collected before the start fails."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Refusal:
    """A feature that was requested, why it is not supported, and how to start without it."""

    feature: str
    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.feature}: {self.reason}; {self.remedy}"


def reject(architecture: str, refusals: Iterable[Refusal], way_back: str) -> None:
    """Raises a ValueError with all refusals. `way_back` says how the host serves its own model."""
    listed = list(refusals)
    if listed:
        lines = "".join(f"\n  - {refusal}" for refusal in listed)
        raise ValueError(f"Hadron cannot compute {architecture} with these settings:{lines}\n{way_back}")
