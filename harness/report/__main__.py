"""`python -m harness.report <run_dir>`: summary.json and report.html again, from the records; two folders: compared.

Exit status: 0 written or compared, 2 bad input or not comparable.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

USAGE = (
    "usage: python -m harness.report <run_dir>    rebuild summary.json and report.html from a run's records; "
    "python -m harness.report <A> <B>    compare two runs' arms"
)


def main(argv: Sequence[str]) -> int:
    if any(argument in ("-h", "--help") for argument in argv):
        print(USAGE)
        return 0
    if len(argv) not in (1, 2) or any(argument.startswith("-") for argument in argv):
        print(f"error: {' '.join(argv) or 'no run given'}: {USAGE}", file=sys.stderr)
        return 2
    from harness.records import RecordError

    try:
        return _rebuild(Path(argv[0])) if len(argv) == 1 else _compare(*map(Path, argv))
    except (RecordError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _rebuild(run_dir: Path) -> int:
    from harness.records import read_run
    from harness.report import build
    from harness.summary import summarize

    study = read_run(run_dir, tables=False)  # they are read below, each once
    summary = summarize(run_dir, study)
    print(run_dir / "summary.json")
    print(build(run_dir, study, summary))
    return 0


def _compare(first: Path, second: Path) -> int:
    from harness.report.compare_runs import compare

    return compare(first, second)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
