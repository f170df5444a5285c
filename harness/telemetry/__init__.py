"""What the machine did while a trial ran: process, host and GPU readings, sampled off the measuring thread."""

from harness.telemetry.sampler import Reading, Sampler

__all__ = ["Reading", "Sampler"]
