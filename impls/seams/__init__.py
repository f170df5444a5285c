"""The contracts at which the axes meet, one file each. An axis folder imports these and `request`, never a sibling."""

from impls.seams.arm import KV_SCALE_BYTES, Arm, Clock, ModelShape
from impls.seams.attention import AttentionBackend, LayerCache, ScaledCache, StepBatch, values_and_scales
from impls.seams.batching import ScheduledStep, Scheduler, never_runs
from impls.seams.decoding import (
    DecodeCosts,
    Decoder,
    DraftHead,
    DraftResources,
    DraftTokens,
    ModelRunner,
    NonFiniteLogitsError,
    Proposer,
)
from impls.seams.execution import CausalLM, Executor, LayerAttention, StepLimits
from impls.seams.kv_cache import (
    BlockStorage,
    Fetch,
    KVCacheManager,
    KVReservation,
    LayerStorage,
    PrefixIndex,
    SwapSpace,
)
from impls.seams.precision import LinearMethod, PackedLinear
from impls.seams.target import DraftForward, Emission, ForeignTarget, StepResult, StepStats, Target
from impls.seams.topology import EngineBuilder, Topology

__all__ = [
    "KV_SCALE_BYTES",
    "Arm",
    "AttentionBackend",
    "BlockStorage",
    "CausalLM",
    "Clock",
    "DecodeCosts",
    "Decoder",
    "DraftForward",
    "DraftHead",
    "DraftResources",
    "DraftTokens",
    "Emission",
    "EngineBuilder",
    "Executor",
    "Fetch",
    "ForeignTarget",
    "KVCacheManager",
    "KVReservation",
    "LayerAttention",
    "LayerCache",
    "LayerStorage",
    "LinearMethod",
    "ModelRunner",
    "ModelShape",
    "NonFiniteLogitsError",
    "PackedLinear",
    "PrefixIndex",
    "Proposer",
    "ScaledCache",
    "ScheduledStep",
    "Scheduler",
    "StepBatch",
    "StepLimits",
    "StepResult",
    "StepStats",
    "SwapSpace",
    "Target",
    "Topology",
    "never_runs",
    "values_and_scales",
]
