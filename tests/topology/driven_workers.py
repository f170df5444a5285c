"""A process that drives workers and never ends by itself: `python driven_workers.py <file> <override>...`.

It writes the ids of its workers to the file, once they have begun to make tokens.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from topology_runs import config_of, requests_of, target_of


def drive(told: Path, overrides: list[str]) -> None:
    target = target_of(config_of(*overrides))
    round_ = 0
    while True:
        for request in requests_of(8, output=60, seed=round_):
            target.add_request(request)
        while target.has_work:
            if target.step(target.clock.now() + 1.0).emissions and not told.exists():
                unfinished = told.with_suffix(".part")
                unfinished.write_text(json.dumps(target.pid_of))
                unfinished.rename(told)
        round_ += 1


if __name__ == "__main__":
    drive(Path(sys.argv[1]), sys.argv[2:])
