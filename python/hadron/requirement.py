"""HADRON_REQUIRE=1: the process ends if a host would serve a model that Hadron does not compute."""

import sys
from typing import NoReturn


def stop(reason: str) -> NoReturn:
    """Ends the process. Hosts log exceptions of plug-ins and continue, but they do not catch SystemExit."""
    print(f"HADRON_REQUIRE=1, but Hadron does not compute the model: {reason}", file=sys.stderr, flush=True)
    raise SystemExit(1)


def no_model(architecture: str) -> str:
    """Returns the reason for an architecture that Hadron has no model for."""
    return f"Hadron has no model for {architecture} under this host; unset HADRON_REQUIRE to serve the host's own model"
