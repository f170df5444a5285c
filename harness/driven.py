"""What driving a stream leaves: who was sent, and the two tables of the record."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from impls.request import Request


@dataclass(frozen=True)
class Driven:
    """``requests``: a row for each of ``sent``, in their order. ``steps``: a row for each step."""

    sent: list[Request]
    requests: pd.DataFrame
    steps: pd.DataFrame
