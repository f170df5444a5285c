"""Bytes and FLOPs of a step, what the machine could do, and whether an arm fits in its memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.gpus import gpu_memory, ordinal
from harness.host_memory import host_memory
from impls.engine import Engine
from impls.seams import CausalLM, DraftHead, ModelShape, StepStats

# Dense peak per GPU: BF16 TFLOP/s, FP8 TFLOP/s (None: no FP8), INT8 TOP/s, memory GB/s. Vendor datasheets, no sparsity.
# The driver's whole name without its vendor: other boards (PCIe, NVL), slices (MIG) and virtual GPUs have longer ones.
DATASHEET = {
    "A100-SXM4-80GB": (312.0, None, 624.0, 2039.0),
    "A100-SXM4-40GB": (312.0, None, 624.0, 1555.0),
    "H100 80GB HBM3": (989.4, 1978.9, 1978.9, 3350.0),
    "H200": (989.4, 1978.9, 1978.9, 4800.0),
    "H200 NVL": (835.5, 1670.5, 1670.5, 4800.0),
    "B200": (2250.0, 4500.0, 4500.0, 8000.0),
    "L4": (121.0, 242.0, 242.0, 300.0),
}


@dataclass(frozen=True)
class Peaks:
    """What the device could do at best: FLOP/s in the arm's arithmetic, bytes/s of its memory, and who says so."""

    flops_per_s: float | None
    bytes_per_s: float | None
    source: str  # "datasheet" | "measured" | "measured, on a busy host" | "unknown"

    def times(self, devices: int) -> Peaks:
        """Of so many such devices together."""

        def all_of(one: float | None) -> float | None:
            return None if one is None else devices * one

        return Peaks(all_of(self.flops_per_s), all_of(self.bytes_per_s), self.source)


@dataclass(frozen=True)
class StepCost:
    """What one step computes (floating-point operations) and moves through memory (bytes)."""

    flops: int
    bytes: int


@dataclass(frozen=True)
class ResidentModel:
    """A model as it lies in memory, as far as a forward's cost depends on it. Sizes in bytes.

    weights_bytes: all that is resident; table_bytes: the head; lookup_bytes: an embedding table beside it, of which a
    step reads a few rows. row_parameters, observe_parameters: as `DraftHead` has them; None: those of all projections.
    """

    shape: ModelShape
    weights_bytes: int
    table_bytes: int
    lookup_bytes: int
    kv_bytes_per_token: int
    row_parameters: int | None = None
    observe_parameters: int = 0


def linear_parameters(shape: ModelShape) -> int:
    """Weights of all projections of all layers; neither embedding nor head."""
    heads = shape.num_heads * shape.head_dim
    kv_heads = shape.num_kv_heads * shape.head_dim
    attention = shape.hidden_size * (heads + 2 * kv_heads) + heads * shape.hidden_size
    return shape.num_layers * (attention + 3 * shape.hidden_size * shape.intermediate_size)


def head_parameters(shape: ModelShape) -> int:
    """Of the LM head, or of the embedding."""
    return shape.vocab_size * shape.hidden_size


def weights_bytes(shape: ModelShape, bits: float) -> int:
    """Resident bytes to expect of layers of so many bits a weight; head and embedding have 16 where that is less."""
    tables = head_parameters(shape) * (1 if shape.tie_embeddings else 2)
    return round(linear_parameters(shape) * bits / 8 + tables * max(bits, 16.0) / 8)


def attended_positions(query_lens: Sequence[int], kv_lens: Sequence[int]) -> int:
    """Query-key pairs of a causal step: row i of q rows that end at position n attends to n - q + i + 1 positions."""
    return sum(q * (n - q) + q * (q + 1) // 2 for q, n in zip(query_lens, kv_lens, strict=True))


def resident_models(engine: Engine, kv_element_bytes: int) -> dict[str, ResidentModel]:
    """The engine's models under the names that a proposer calls them by: `target` and, where there is one, `draft`, or
    the proposer's own `head`."""

    def resident(model: CausalLM | DraftHead, *parameters: int) -> ResidentModel:
        kv_bytes = model.shape.kv_bytes_per_token(kv_element_bytes)
        sizes = model.weights_bytes, model.head_bytes, model.lookup_bytes, kv_bytes
        return ResidentModel(model.shape, *sizes, *parameters)

    executors = {"target": engine.executor, "draft": engine.draft_executor}
    models = {name: resident(executor.model) for name, executor in executors.items() if executor is not None}
    head = None if engine.proposer is None else engine.proposer.head
    if head is not None:
        models["head"] = resident(head, head.row_parameters, head.observe_parameters)
    return models


def forward_cost(
    model: ResidentModel,
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    num_logits_rows: int,
    gathered_bytes: int = 0,
    num_layers: int | None = None,
) -> StepCost:
    """FLOPs (a multiply-add is two) of one forward through ``num_layers`` layers (None: all), and the bytes it moves.

    Bytes, at least: the head and every weight of these layers once (a table that is only looked up is left out), each
    sequence's K/V once, the K/V written, and what the backend copies to make its cache readable (once read, once
    written; ``gathered_bytes`` is of all layers).
    """
    shape, rows = model.shape, sum(query_lens)
    layers = shape.num_layers if num_layers is None else min(num_layers, shape.num_layers)
    pairs = attended_positions(query_lens, kv_lens)
    parameters = linear_parameters(shape) if model.row_parameters is None else model.row_parameters
    per_layer = 2 * rows * parameters // shape.num_layers + 4 * pairs * shape.num_heads * shape.head_dim
    flops = layers * per_layer + 2 * num_logits_rows * head_parameters(shape)
    in_layers = model.weights_bytes - model.table_bytes - model.lookup_bytes
    in_layers += (sum(kv_lens) + rows) * model.kv_bytes_per_token + 2 * gathered_bytes
    return StepCost(flops, in_layers * layers // shape.num_layers + model.table_bytes)


def observe_cost(head: ResidentModel, rows: int) -> StepCost:
    """What a draft head computes for each row of the target's step: its keys and values, from the target's states."""
    if not head.row_parameters or not head.observe_parameters:
        return StepCost(0, 0)
    weights = (head.weights_bytes - head.table_bytes) * head.observe_parameters // head.row_parameters
    return StepCost(2 * rows * head.observe_parameters, weights + rows * head.kv_bytes_per_token)


def cost_of_step(models: Mapping[str, ResidentModel], stats: StepStats) -> StepCost:
    """The target's forward and those that drafted, in whatever precision: MFU holds all against the target's peak.

    models: as `resident_models` names them.
    """
    costs = [
        forward_cost(
            models["target"],
            stats.query_lens,
            stats.kv_lens,
            num_logits_rows=stats.num_logits_rows,
            gathered_bytes=stats.gathered_bytes,
        )
    ]
    costs += [
        forward_cost(
            models[draft.model],
            draft.query_lens,
            draft.kv_lens,
            num_logits_rows=len(draft.query_lens),
            gathered_bytes=draft.gathered_bytes,
            num_layers=draft.num_layers,
        )
        for draft in stats.draft_forwards
    ]
    if "head" in models:
        costs.append(observe_cost(models["head"], sum(stats.query_lens)))
    return StepCost(sum(cost.flops for cost in costs), sum(cost.bytes for cost in costs))


def memory_total_bytes(device: str) -> int:
    """``device`` as torch names it: ``cuda:1`` is the second GPU."""
    return gpu_memory(ordinal(device))[1] if device.startswith("cuda") else host_memory().total


def memory_free_bytes(device: str) -> int:
    """Of a GPU, or of what this process may use of the host's."""
    return gpu_memory(ordinal(device))[0] if device.startswith("cuda") else host_memory().available


def does_not_fit(
    models: Sequence[tuple[ModelShape, float]], kv_bytes: int, activation_rows: int, device: str, head_bytes: int = 0
) -> str | None:
    """The reason why weights, cache and activations cannot lie in the device's memory; None if they can.

    models: (shape, bits of a layer's weight) of each that is resident, the target first; ``kv_bytes`` holds the K/V of
    all of them. They run one after another, so the widest one's activations count. head_bytes: of draft heads.
    """
    activations = max(4 * activation_rows * 2 * (shape.hidden_size + shape.intermediate_size) for shape, _ in models)
    needed = sum(weights_bytes(*model) for model in models) + head_bytes + kv_bytes + activations
    has = memory_total_bytes(device)
    return None if needed <= has else f"needs {needed / 1e9:.0f} GB, has {has / 1e9:.0f} GB"


def datasheet_peaks(device_name: str, arithmetic: str) -> Peaks | None:
    """arithmetic: `LinearMethod.arithmetic`. None where the datasheets have no GPU of exactly this name."""
    figures = DATASHEET.get(device_name.removeprefix("NVIDIA "))
    if figures is None:
        return None
    bf16, fp8, int8, bandwidth = figures
    tera = {"fp8": fp8, "int8": int8, "fp32": None}.get(arithmetic, bf16)
    return Peaks(tera * 1e12 if tera else None, bandwidth * 1e9, "datasheet")


def utilisation(flops: float, moved_bytes: float, peaks: Peaks, seconds: float) -> dict[str, float | None]:
    """MFU and MBU of what was done in ``seconds``, against what the peaks would allow."""

    def share(total: float, peak: float | None) -> float | None:
        return total / (seconds * peak) if peak and seconds > 0 else None

    return {"mfu": share(flops, peaks.flops_per_s), "mbu": share(moved_bytes, peaks.bytes_per_s)}
