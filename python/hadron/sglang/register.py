"""Entry point of the group `sglang.srt.plugins`, which SGLang calls in each process, before it parses arguments."""

import logging
from importlib.metadata import version
from typing import Any

from hadron import requirement
from hadron.abi import library_version
from hadron.adapters import ADAPTERS
from hadron.environment import Environment, read_environment

TESTED_VERSIONS = ("0.5.17",)
WAY_BACK = "HADRON_DISABLE_SGLANG_PLUGIN=1 serves SGLang's own model."
BACKEND = "hadron"
MODEL_PACKAGE = "hadron.sglang.models"

logger = logging.getLogger(__name__)


def register() -> None:
    """Registers Hadron's models, unless the plug-in is disabled."""
    try:
        environment = read_environment()
    except ValueError as error:  # SGLang would log it and serve its own model.
        requirement.stop(str(error))
    if environment.disable_sglang_plugin:
        if environment.require:
            requirement.stop("HADRON_DISABLE_SGLANG_PLUGIN=1 disables the plug-in")
        return
    try:
        _register_all(environment)
    except Exception as error:
        if environment.require:
            requirement.stop(str(error))
        logger.error("Hadron's models are not registered, SGLang serves its own: %s", error)


def _register_all(environment: Environment) -> None:
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices

    if BACKEND in ATTENTION_BACKEND_CHOICES:
        return
    library_version()
    _register_models()
    _warn_about_version()
    add_attention_backend_choices([BACKEND])
    register_attention_backend(BACKEND)(_attention_backend)
    _register_hooks()
    _register_overrides(environment)


def _register_hooks() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from hadron.sglang.kv_pool import BUFFERS_TARGET, create_buffers
    from hadron.sglang.weights import UPDATE_TARGETS, refuse_update

    HookRegistry.register(BUFFERS_TARGET, create_buffers, HookType.AROUND)
    for target in UPDATE_TARGETS:
        HookRegistry.register(target, refuse_update, HookType.AROUND)


def _register_models() -> None:
    """Names the package of the models. SGLang imports it with its own models, in the processes that need them."""
    from sglang.srt.environ import envs

    named = envs.SGLANG_EXTERNAL_MODEL_PACKAGE.get()
    if named not in ("", MODEL_PACKAGE):
        raise ValueError(f"SGLANG_EXTERNAL_MODEL_PACKAGE={named} replaces Hadron's models: unset it")
    envs.SGLANG_EXTERNAL_MODEL_PACKAGE.set(MODEL_PACKAGE)


def _register_overrides(environment: Environment) -> None:
    from sglang.srt.arg_groups.overrides import register_model_override, register_model_override_predicate

    from hadron.sglang.overrides import require_architecture, server_overrides

    for architecture in ADAPTERS:
        register_model_override(architecture)(server_overrides)
    if environment.require:
        register_model_override_predicate(lambda architecture: architecture not in ADAPTERS)(require_architecture)


def _attention_backend(runner: Any) -> Any:
    from hadron.sglang.attention import HadronAttentionBackend

    return HadronAttentionBackend(runner)


def _warn_about_version() -> None:
    found = version("sglang").partition("+")[0]
    if found not in TESTED_VERSIONS:
        tested = ", ".join(TESTED_VERSIONS)
        logger.warning("Hadron's plug-in was tested with SGLang %s, this is SGLang %s.", tested, found)
