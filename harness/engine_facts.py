"""What a trial's record says of the engines that it drives, read from them where they run: here, or in workers."""

from __future__ import annotations

from dataclasses import dataclass

from harness.limits import ResidentModel, resident_models
from harness.linear_stages import Record, linear_stage_times, row_counts
from harness.texts import one_line
from impls.engine import Engine


@dataclass(frozen=True)
class EngineFacts:
    """``kernels``: which this arm reaches on this device. ``models``: as `resident_models` names them."""

    kernels: dict[str, str]
    emulated: list[str]
    weights_bytes: int
    speculation: bool
    models: dict[str, ResidentModel]


def engine_facts(engine: Engine, kv_element_bytes: int) -> EngineFacts:
    return EngineFacts(
        kernels=kernels(engine, kv_element_bytes),
        emulated=emulated(engine),
        weights_bytes=engine.weights_bytes,
        speculation=engine.decoder.uses_proposer,
        models=resident_models(engine, kv_element_bytes),
    )


def kernels(engine: Engine, kv_element_bytes: int = 2) -> dict[str, str]:
    """By what they compute, the names of the kernels that the engine has chosen."""
    model, attention = engine.executor.model, engine.executor.attention
    found = {
        "linear": model.method.kernel,
        "head": model.method.head_method().kernel,
        "elementwise": engine.executor.compiler or model.elementwise_kernel,
        "attention": type(attention).__name__ + (f", {attention.reads_scaled}" if kv_element_bytes == 1 else ""),
    }
    found |= {"calibration": model.packed_by} if model.packed_by else {}
    return found | ({"swap": engine.swap.route} if engine.scheduler.preemption == "swap" else {})


def emulated(engine: Engine) -> list[str]:
    """What of its arithmetic or decoding is not the real thing on this device."""
    parts = (engine.executor.model.method, engine.decoder)
    return [note for note in (getattr(part, "emulated", None) for part in parts) if note]


def time_linear_layers(engine: Engine) -> tuple[list[Record] | None, list[str]]:
    """`linear_stage_times` and warnings: a window that has been measured is not lost to what comes after it."""
    try:
        return linear_stage_times(engine.executor.model, row_counts(engine.scheduler.max_num_seqs)), []
    except (RuntimeError, MemoryError) as error:  # torch raises RuntimeError when a device is out of memory
        return None, [f"the linear layers could not be timed: {one_line(str(error))}"]
