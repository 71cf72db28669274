"""Entry point of the group `vllm.general_plugins`. vLLM calls `register` in each process, possibly more than once."""

from importlib.metadata import version
from typing import Any

from hadron import requirement
from hadron.abi import library_version
from hadron.adapters import ADAPTERS
from hadron.environment import Environment, read_environment

TESTED_VERSIONS = ("0.26.0",)
WAY_BACK = "HADRON_DISABLE_VLLM_PLUGIN=1 serves vLLM's own model."


def register() -> None:
    """Registers Hadron's models, unless the plug-in is disabled."""
    environment = read_environment()
    if environment.disable_vllm_plugin:
        if environment.require:
            requirement.stop("HADRON_DISABLE_VLLM_PLUGIN=1 disables the plug-in")
        return
    try:
        _register_models(environment)
    except Exception as error:
        if environment.require:
            requirement.stop(str(error))
        _logger().error("Hadron's models are not registered, vLLM serves its own: %s", error)


def _register_models(environment: Environment) -> None:
    from vllm.model_executor.models.registry import ModelRegistry

    library_version()
    _warn_about_version()
    for architecture in ADAPTERS:
        ModelRegistry.register_model(architecture, f"hadron.vllm.model:{architecture}")
    if environment.require:
        for architecture in set(ModelRegistry.get_supported_archs()) - ADAPTERS.keys():
            ModelRegistry.register_model(architecture, f"hadron.vllm.required:{architecture}")


def _warn_about_version() -> None:
    found = version("vllm").partition("+")[0]
    if found not in TESTED_VERSIONS:
        tested = ", ".join(TESTED_VERSIONS)
        _logger().warning_once("Hadron's plug-in was tested with vLLM %s, this is vLLM %s.", tested, found)


def _logger() -> Any:
    from vllm.logger import init_logger

    return init_logger(f"vllm.{__name__}")
