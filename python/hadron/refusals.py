"""Refusals: features of a host that Hadron's models do not have. All of them are collected before the start fails."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Refusal:
    """A feature that was requested, why it is not supported, and how to start without it."""

    feature: str
    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.feature}: {self.reason}; {self.remedy}"


@dataclass(frozen=True)
class Rule:
    """A refusal, and the settings of a host for which it applies."""

    refusal: Refusal
    applies: Callable[[Any], object]


def rule(feature: str, reason: str, remedy: str, applies: Callable[[Any], object]) -> Rule:
    """Returns the rule of a feature that is refused where `applies` is true of the settings."""
    return Rule(Refusal(feature, reason, remedy), applies)


def reject(architecture: str, refusals: Iterable[Refusal], way_back: str) -> None:
    """Raises a ValueError with all refusals. `way_back` says how the host serves its own model."""
    listed = list(refusals)
    if listed:
        lines = "".join(f"\n  - {refusal}" for refusal in listed)
        raise ValueError(f"Hadron cannot compute {architecture} with these settings:{lines}\n{way_back}")
