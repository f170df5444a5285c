"""Which GPUs a trial runs on, as NVML knows them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Device:
    """NVML handles of one CUDA device: ``handle`` is the device itself, a GPU or a MIG instance; ``gpu`` is the GPU.

    ``gpu_instance``: the id of the GPU instance that a MIG device lies in, None for a whole GPU.
    """

    handle: Any
    gpu: Any
    gpu_instance: int | None = None


def cuda_uuids() -> dict[int, str]:
    """UUID by CUDA ordinal, of those devices on which this process holds memory; call it once a model is loaded.

    CUDA is asked, since its ordinals follow CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER, and NVML's indices neither.
    """
    used = [i for i in range(torch.cuda.device_count()) if torch.cuda.memory_reserved(i)]
    return {i: str(torch.cuda.get_device_properties(i).uuid) for i in used}


def find_device(nvml: Any, uuid: str, environment: Mapping[str, str]) -> Device | None:
    """The device that CUDA gives this UUID (no prefix), or None where NVML does not know it."""
    for prefix in ("GPU-", "MIG-"):
        try:
            handle = nvml.nvmlDeviceGetHandleByUUID(prefix + uuid)
        except (nvml.NVMLError_NotFound, nvml.NVMLError_InvalidArgument):
            continue
        if prefix == "MIG-":
            return _instance(nvml, handle)
        return _instance_in_use(nvml, handle, environment) if _is_divided(nvml, handle) else Device(handle, handle)
    return None


def _is_divided(nvml: Any, gpu: Any) -> bool:
    try:
        current, _ = nvml.nvmlDeviceGetMigMode(gpu)
    except nvml.NVMLError:
        return False  # a GPU without MIG refuses the question
    return bool(current == nvml.NVML_DEVICE_MIG_ENABLE)


def _instance_in_use(nvml: Any, gpu: Any, environment: Mapping[str, str]) -> Device | None:
    """CUDA runs on one MIG instance at most: the first that CUDA_VISIBLE_DEVICES names, else the GPU's first."""
    named = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    if named.startswith("MIG-"):
        return _instance(nvml, nvml.nvmlDeviceGetHandleByUUID(named))
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
        try:
            return _instance(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index))
        except nvml.NVMLError_NotFound:
            continue  # instances may leave gaps in the numbering
    return None


def _instance(nvml: Any, handle: Any) -> Device:
    gpu = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
    return Device(handle, gpu, nvml.nvmlDeviceGetGpuInstanceId(handle))
