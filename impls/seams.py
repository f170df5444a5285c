"""The contracts at which the axes meet. An axis folder imports this module and `request`, never a sibling axis."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from impls.request import Request, Sequence


class Clock(Protocol):
    """The only clock that anything in `impls` may read: seconds since the run's start."""

    def now(self) -> float: ...

    def sleep_until(self, deadline_s: float) -> None: ...


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a Llama-family model that decide bytes, FLOPs and tensor shapes."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    rms_norm_eps: float = 1e-5
    tie_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    def kv_bytes_per_token(self, element_bytes: int = 2) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * element_bytes


@dataclass(frozen=True)
class Arm:
    """What `validate` of an axis option may look at: the whole arm, resolved, before anything is built.

    ``axes`` maps a group name (batching, kv_cache, ...) to its resolved config; ``device`` is "cpu" or "cuda".
    """

    axes: Mapping[str, Mapping[str, Any]]
    model: ModelShape
    max_model_len: int
    device: str
    kv_budget_bytes: int
    element_bytes: int = 2


# --- batching ---------------------------------------------------------------------------------------------------------


@dataclass
class ScheduledStep:
    """Who runs in this step, in row order. Plain picklable data.

    num_scheduled_tokens: tokens per sequence that are computed (drafts included, padding not); dead rows are in here
        with the one position they recompute. padding_tokens: extra rows per sequence that only static batching pays.
    """

    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    padding_tokens: dict[str, int] = field(default_factory=dict)
    dead_rows: tuple[str, ...] = ()
    preempted: tuple[str, ...] = ()
    rejected: dict[str, str] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        return not self.num_scheduled_tokens

    @property
    def total_tokens(self) -> int:
        """Rows that the model computes in this step."""
        return sum(self.num_scheduled_tokens.values()) + sum(self.padding_tokens.values())


class Scheduler(ABC):
    """A pure policy over its queues and the cache's free space; knows no model and no tensor.

    ``waiting`` and ``running`` are in order of arrival; ``slots`` shows which sequence sits in which of the
    ``max_num_seqs`` rows (None = free), finished ones included for as long as they hold the row.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    emit: str = "step"  # or "batch_end": what a caller of a batch pipeline sees

    @classmethod
    def validate(cls, arm: Arm) -> list[str]:
        return []

    @abstractmethod
    def add(self, sequence: Sequence, now_s: float) -> None: ...

    @abstractmethod
    def schedule(self, now_s: float) -> ScheduledStep:
        """Decide the next step, allocating its cache space. Empty if nothing can run now (see `next_event_s`).

        A sequence in ``rejected`` can never run (reason as value) and has left the queues. A preempted one is back in
        ``waiting`` with ``num_computed_tokens`` 0, its blocks freed and its drafts dropped.
        """

    @abstractmethod
    def finish(self, sequence: Sequence) -> bool:
        """The engine has set ``finish_reason``. True if the row's cache was freed, False if it is kept (static)."""

    @abstractmethod
    def abort(self, seq_id: str) -> None:
        """Remove a sequence wherever it is and free its blocks."""

    @abstractmethod
    def next_event_s(self, now_s: float) -> float | None:
        """When an empty `schedule` is worth repeating without a new arrival (a batch timeout); None: never."""

    @property
    @abstractmethod
    def running(self) -> Seq[Sequence]: ...

    @property
    @abstractmethod
    def num_waiting(self) -> int: ...

    @property
    @abstractmethod
    def slots(self) -> Seq[str | None]: ...


# --- kv cache ---------------------------------------------------------------------------------------------------------


class KVCacheManager(ABC):
    """Metadata only: which blocks a sequence holds. Contiguous is one block of max_model_len per sequence."""

    block_size: int
    num_blocks: int
    capacity_tokens: int  # what the budget buys, before it is cut into blocks

    @classmethod
    def validate(cls, arm: Arm) -> list[str]:
        return []

    @abstractmethod
    def allocate(self, seq_id: str, num_tokens: int) -> bool:
        """Hold blocks for positions 0..num_tokens-1, all or nothing; False leaves everything as it was."""

    @abstractmethod
    def can_allocate(self, seq_id: str, num_tokens: int) -> bool: ...

    @abstractmethod
    def commit(self, seq_id: str, num_computed_tokens: int) -> None:
        """These positions are written and verified; whatever was allocated past them stays reserved."""

    @abstractmethod
    def free(self, seq_id: str) -> None: ...

    @abstractmethod
    def block_table(self, seq_id: str) -> Seq[int]: ...

    @abstractmethod
    def reserved_tokens(self, seq_id: str) -> int:
        """Positions held by this sequence: blocks x block size (max_model_len for contiguous)."""

    @property
    @abstractmethod
    def num_free_blocks(self) -> int: ...

    @abstractmethod
    def check_invariants(self) -> None:
        """Recompute every derived quantity and raise AssertionError where one is off."""

    def never_fits(self, num_tokens: int) -> bool:
        """True if a sequence of that length could not be held even by an empty cache."""
        return -(-num_tokens // self.block_size) > self.num_blocks


@dataclass(frozen=True)
class KVReservation:
    """One sequence's hold on the cache in one step, in positions; split once its final length is known."""

    request_id: str
    reserved: int
    used: int
    finished: bool


# --- the step as tensors ----------------------------------------------------------------------------------------------


@dataclass
class StepBatch:
    """A prepared step. T rows (tokens), S sequences, R rows whose logits are wanted.

    input_ids, positions, slot_mapping: int64 [T] (slot = block * block_size + offset; -1 = do not store).
    query_start: int32 [S + 1]; seq_lens: int32 [S], K/V length after this step; block_table: int32 [S, max_blocks],
    rows padded with 0. logits_indices: int64 [R], rows of T. query_lens/kv_lens: the same lengths on the host.
    """

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    query_start: Tensor
    seq_lens: Tensor
    block_table: Tensor
    logits_indices: Tensor
    query_lens: list[int]
    kv_lens: list[int]
    block_size: int
    seq_ids: list[str] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        return int(self.input_ids.shape[0])

    @property
    def max_query_len(self) -> int:
        return max(self.query_lens, default=0)


class AttentionBackend(ABC):
    """Causal attention of a step's queries over a paged (or one-block) cache.

    q: [T, num_heads, head_dim]; k_cache, v_cache: one layer, [num_blocks, block_size, num_kv_heads, head_dim]; the
    step's own keys and values are already stored. Row i of a sequence attends to positions 0..its own position.
    Never reads a slot that was not written for that sequence. Returns [T, num_heads, head_dim] in q's dtype.
    """

    def __init__(self, shape: ModelShape, device: torch.device) -> None:
        self.shape, self.device = shape, device

    @classmethod
    def validate(cls, arm: Arm) -> list[str]:
        return []

    @abstractmethod
    def prepare(self, batch: StepBatch) -> None:
        """Once a step, before the first layer: whatever does not depend on the layer."""

    @abstractmethod
    def forward(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, layer: int) -> Tensor: ...

    def gathered_bytes(self, batch: StepBatch) -> int:
        """Bytes that this backend copies per step only to make the cache readable (all layers); counted in `bytes`."""
        return 0


# --- precision --------------------------------------------------------------------------------------------------------


@dataclass
class PackedLinear:
    """One layer's weights as a `LinearMethod` keeps them. ``tensors`` are what is resident (scales included)."""

    in_features: int
    out_features: int
    tensors: dict[str, Tensor]
    bias: Tensor | None = None

    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors.values())


class LinearMethod(ABC):
    """In what numbers a linear layer is kept and computed. The dequantised weights are the exact test reference."""

    name: str
    activation_dtype: torch.dtype  # of hidden states between layers, and of q, k, v
    emulated: str | None = None  # what is emulated on this device, None if nothing is
    kernel: str = ""  # the kernel that `apply` reaches on this device, for the record

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @classmethod
    def validate(cls, arm: Arm) -> list[str]:
        return []

    @abstractmethod
    def pack(self, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        """From FP32 [out_features, in_features] on the CPU to what stays resident on the device."""

    @abstractmethod
    def apply(self, x: Tensor, packed: PackedLinear) -> Tensor:
        """[rows, in_features] in ``activation_dtype`` to [rows, out_features] in ``activation_dtype``."""

    @abstractmethod
    def dequantize(self, packed: PackedLinear) -> Tensor:
        """FP32 [out_features, in_features]: exactly the weights that `apply` computes with."""

    def rows(self, packed: PackedLinear, ids: Tensor) -> Tensor | None:
        """A copy of the rows ``ids`` (int64 [T]) of the weights, [T, in_features] in ``activation_dtype``: a tied
        embedding. None if the layout cannot be read row by row; then, and only then, a second table is kept.
        """
        return None

    def head_method(self) -> LinearMethod:
        """The method for the LM head; the quantised methods leave it in BF16, as deployed checkpoints do."""
        return self


# --- decoding ---------------------------------------------------------------------------------------------------------


@dataclass
class DraftTokens:
    """Drafts of one sequence. ``probs``: [k, vocab] FP32, the distribution each was drawn from; None = one-hot."""

    token_ids: list[int]
    probs: Tensor | None = None


class NonFiniteLogitsError(ArithmeticError):
    """The model gave NaN or infinity (or -inf only) where a token was to be chosen. ``seq_ids`` says for whom."""

    def __init__(self, seq_ids: Seq[str]) -> None:
        super().__init__(f"non-finite logits for {', '.join(seq_ids)}")
        self.seq_ids = tuple(seq_ids)


class Decoder(ABC):
    """From a step's logits to the tokens that it yields."""

    uses_proposer: bool = False
    emulated: str | None = None  # which setting stands in for a real decision, None if none does

    @classmethod
    def validate(cls, arm: Arm) -> list[str]:
        return []

    @abstractmethod
    def decode(self, sequences: Seq[Sequence], logits: Tensor, drafts: Mapping[str, DraftTokens]) -> list[list[int]]:
        """The new tokens of each sequence: its accepted drafts, then one recovered or bonus token (at least one).

        logits: FP32 [R, vocab]; a sequence owns ``len(draft_token_ids) + 1`` consecutive rows, in the order given; its
        row j is the target's distribution of position ``num_tokens + j``. Tokens past a stop token or ``max_tokens``
        are the engine's to cut.
        """


class ModelRunner(Protocol):
    """How a proposer runs a model over the blocks that its sequences already hold."""

    def draft_forward(
        self, tokens: Mapping[str, Seq[int]], starts: Mapping[str, int], *, model: str, num_layers: int | None = None
    ) -> dict[str, Tensor]:
        """Run ``tokens[id]`` at positions ``starts[id]``...; FP32 logits [vocab] of each sequence's last row.

        model: "target" or "draft"; num_layers: stop after so many of its layers, then final norm and head.
        """


class Proposer(ABC):
    """Drafts tokens. Its K/V is extra layers in the same blocks, so preemption, rollback and the budget cover it."""

    num_draft_tokens: int
    needs_draft_model: bool = False
    max_lookahead_tokens: int = 0  # positions past num_tokens that `propose` itself writes K/V to

    @classmethod
    def validate(cls, arm: Arm) -> list[str]:
        return []

    @abstractmethod
    def propose(self, sequences: Seq[Sequence], k: Mapping[str, int], runner: ModelRunner) -> dict[str, DraftTokens]:
        """At most ``k[id]`` drafts for each sequence (fewer, or none, are fine)."""

    def observe(self, batch: StepBatch, hidden_states: Tensor | None) -> None:
        """After every step, prefill included: final-normed hidden states [T, hidden]."""

    def forget(self, seq_id: str) -> None:
        """The sequence finished or was preempted: drop what is kept for it."""


# --- execution --------------------------------------------------------------------------------------------------------

# Stores k, v [T, num_kv_heads, head_dim] of a layer, attends with q [T, num_heads, head_dim]: (layer, q, k, v) -> out.
LayerAttention = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class CausalLM(Protocol):
    """What an executor runs: a Llama-family model over the flattened rows of a step."""

    shape: ModelShape
    method: LinearMethod

    @property
    def weights_bytes(self) -> int:
        """Bytes of all resident weights."""

    @property
    def lookup_bytes(self) -> int:
        """Bytes of an embedding table that no matrix product reads; 0 where the head's own memory serves the lookup."""

    def forward(
        self, input_ids: Tensor, positions: Tensor, attend: LayerAttention, num_layers: int | None = None
    ) -> Tensor:
        """Final-normed hidden states [T, hidden]."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] to FP32 [R, vocab]."""


class Executor(ABC):
    """How a step is launched. Eager is the norm; compiled and graph variants must match it."""

    model: CausalLM
    attention: AttentionBackend
    attention_s: float | None = None  # of the last `execute`: inside `LayerAttention`; None where it cannot be told

    @classmethod
    def validate(cls, arm: Arm) -> list[str]:
        return []

    @abstractmethod
    def execute(self, batch: StepBatch) -> tuple[Tensor, Tensor]:
        """FP32 logits [R, vocab] and final-normed hidden states [T, hidden]."""

    @abstractmethod
    def draft(self, batch: StepBatch, num_layers: int | None = None) -> Tensor:
        """For a proposer: FP32 logits [R, vocab] after the first ``num_layers`` layers (None = all)."""

    def warm_up(self, max_num_seqs: int) -> None:
        """Compile or capture every shape that will be run; called before the timed window."""


# --- what a step gave -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Emission:
    """Tokens of one request, with the time at which they left the engine. ``finish_reason`` is set on the last."""

    request_id: str
    token_ids: tuple[int, ...]
    time_s: float
    finish_reason: str | None = None
    error: str | None = None


@dataclass(frozen=True)
class DraftForward:
    """One forward of a drafting model: rows and K/V lengths by sequence, one row of logits each.

    model, num_layers: as `ModelRunner.draft_forward` takes them. gathered_bytes: the backend's, of all layers.
    """

    model: str
    num_layers: int | None
    query_lens: list[int]
    kv_lens: list[int]
    gathered_bytes: int = 0


@dataclass
class StepStats:
    """One row of steps.parquet before the recorder numbers it and splits the KV parts. Times: seconds of the clock."""

    start_s: float
    end_s: float = 0.0
    schedule_s: float = 0.0
    prepare_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0
    propose_s: float = 0.0
    commit_s: float = 0.0
    attention_s: float | None = None  # the part of forward_s in which layers store K/V and attend; None: not known
    prefill_tokens: int = 0
    decode_tokens: int = 0
    padding_tokens: int = 0
    dead_rows: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    running: int = 0
    waiting: int = 0
    preempted: int = 0
    slot_request_ids: list[str | None] = field(default_factory=list)
    scheduled: list[str] = field(default_factory=list)  # requests with live rows in this step
    preempted_ids: list[str] = field(default_factory=list)
    drafted: dict[str, tuple[int, int]] = field(default_factory=dict)  # request -> (drafted, accepted) in this step
    kv_capacity_tokens: int = 0
    kv_free_tokens: int = 0  # capacity not held by any sequence
    kv_allocation_unit: int = 1  # tokens in a block
    kv_reservations: list[KVReservation] = field(default_factory=list)
    query_lens: list[int] = field(default_factory=list)  # rows per sequence, padding and dead rows included
    kv_lens: list[int] = field(default_factory=list)
    num_logits_rows: int = 0
    gathered_bytes: int = 0
    draft_forwards: list[DraftForward] = field(default_factory=list)  # in order, by what drafted at this step's end


@dataclass
class StepResult:
    """What `step` gave; ``stats`` is None if no step of ours ran (idle until ``until``, or a remote server)."""

    emissions: list[Emission] = field(default_factory=list)
    stats: StepStats | None = None


class Target(Protocol):
    """Anything that can be driven: our engine, transformers, a remote server."""

    def add_request(self, request: Request) -> None: ...

    def step(self, until: float) -> StepResult:
        """Run one step, or wait (at most until the clock shows ``until``) if nothing can run."""

    @property
    def has_work(self) -> bool: ...

    def abort(self, request_id: str) -> None: ...

    def close(self) -> None: ...
