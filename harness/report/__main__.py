"""`python -m harness.report <run_dir>`: summary.json and report.html again, from the records.

Exit status: 0 written, 2 bad input.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

USAGE = "usage: python -m harness.report <run_dir>    rebuild summary.json and report.html from a run's records"


def main(argv: Sequence[str]) -> int:
    if any(argument in ("-h", "--help") for argument in argv):
        print(USAGE)
        return 0
    if len(argv) != 1 or argv[0].startswith("-"):
        print(f"error: {' '.join(argv) or 'no run given'}: {USAGE}", file=sys.stderr)
        return 2
    from harness.records import RecordError, read_run
    from harness.report import build
    from harness.summary import summarize

    run_dir = Path(argv[0])
    try:
        study = read_run(run_dir)
        summary = summarize(run_dir, study)
        print(run_dir / "summary.json")
        print(build(run_dir, study, summary))
    except (RecordError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
