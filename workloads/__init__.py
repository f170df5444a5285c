"""What traffic: a seeded stream of requests, the same in every arm."""

from workloads.build import build_stream
from workloads.errors import WorkloadError
from workloads.stream import RequestStream
from workloads.tokenizer import Tokenizer

__all__ = ["RequestStream", "Tokenizer", "WorkloadError", "build_stream"]
