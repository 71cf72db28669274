"""Folders of the CUDA and ROCm libraries that Python packages install, such as nvidia-cuda-nvrtc and torch."""

import importlib.util
from pathlib import Path


def library_folders() -> list[str]:
    """Returns the existing folders, in the order in which they are searched."""
    nvidia = [folder for package in _locations("nvidia") for folder in sorted(package.glob("*/lib"))]
    torch = [package / "lib" for package in _locations("torch")]
    return [str(folder) for folder in nvidia + torch if folder.is_dir()]


def _locations(package: str) -> list[Path]:
    spec = importlib.util.find_spec(package)
    return [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
