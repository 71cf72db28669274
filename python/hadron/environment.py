"""Environment variables of the package. No other module reads the environment."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Environment:
    """Values of the HADRON_ variables."""

    disable_vllm_plugin: bool
    disable_sglang_plugin: bool
    require: bool
    threads: int | None
    kernel_cache: Path
    plugin_library: Path | None


def read_environment(variables: Mapping[str, str] = os.environ) -> Environment:
    """Reads the variables. A value that is not valid is a ValueError that names the variable."""
    return Environment(
        disable_vllm_plugin=_switch(variables, "HADRON_DISABLE_VLLM_PLUGIN"),
        disable_sglang_plugin=_switch(variables, "HADRON_DISABLE_SGLANG_PLUGIN"),
        require=_switch(variables, "HADRON_REQUIRE"),
        threads=_count(variables, "HADRON_THREADS"),
        kernel_cache=_path(variables, "HADRON_KERNEL_CACHE") or Path("~/.cache/hadron/kernels").expanduser(),
        plugin_library=_path(variables, "HADRON_PLUGIN_LIBRARY"),
    )


def _switch(variables: Mapping[str, str], name: str) -> bool:
    value = variables.get(name, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{name}={value}: 0 or 1 is expected")
    return value == "1"


def _count(variables: Mapping[str, str], name: str) -> int | None:
    value = variables.get(name, "")
    if not value:
        return None
    if not value.isdecimal() or int(value) == 0:
        raise ValueError(f"{name}={value}: a positive integer is expected")
    return int(value)


def _path(variables: Mapping[str, str], name: str) -> Path | None:
    value = variables.get(name, "")
    return Path(value).expanduser() if value else None
