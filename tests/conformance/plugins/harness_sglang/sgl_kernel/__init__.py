"""Stands in for SGLang's GPU kernels: every name can be imported, none can be called."""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

__version__ = "0.4.5"
__path__: list[str] = []


class AbsentKernel:
    """A name of the library. Its attributes are absent kernels too."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> "AbsentKernel":
        if name.startswith("__"):
            raise AttributeError(name)
        return AbsentKernel(f"{self._name}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(f"sgl_kernel.{self._name} was called, but this machine has no GPU kernels")


class AbsentModule(ModuleType):
    """A submodule of the library."""

    __path__: list[str] = []  # noqa: RUF012 (attribute of a package)

    def __getattr__(self, name: str) -> AbsentKernel:
        return __getattr__(name)


class AbsentModules(MetaPathFinder, Loader):
    """Imports every submodule."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.startswith("sgl_kernel.") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return AbsentModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def __getattr__(name: str) -> AbsentKernel:
    if name.startswith("__"):
        raise AttributeError(name)
    return AbsentKernel(name)


sys.meta_path.append(AbsentModules())
