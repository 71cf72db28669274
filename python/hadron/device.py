"""The device on which torch and Hadron compute."""

import torch

from hadron.environment import Environment
from hadron.library_folders import library_folders


def device_options(device_type: str, environment: Environment) -> dict[str, object]:
    """Returns the options of hadron_open for a device type of torch. It is `cuda` for ROCm as well."""
    if device_type == "cpu":
        return {"device": "cpu"}
    if device_type != "cuda":
        raise ValueError(f"Hadron has no kernels for {device_type}: CUDA, ROCm and CPUs are supported")
    return {
        "device": "rocm" if torch.version.hip else "cuda",
        "device_index": torch.cuda.current_device(),
        "kernel_cache": str(environment.kernel_cache),
        "library_folders": library_folders(),
    }


def device_name(device_type: str) -> str:
    """Returns the name of the current device, such as cuda:0."""
    return f"cuda:{torch.cuda.current_device()}" if device_type == "cuda" else device_type


def current_stream(device: torch.device) -> int:
    """Returns the handle of the stream on which the host runs or captures a step; 0 on a CPU."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
