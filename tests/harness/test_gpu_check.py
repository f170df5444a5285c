"""scripts/gpu_check.sh with a Python that only says what it was asked: its time, its stages, where the records go."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_check.sh"
GPU, FOLDER = "NVIDIA H100 80GB HBM3", "h100_80gb_hbm3"
FAKE_PYTHON = f"""#!/bin/sh
for last; do :; done
case "$*" in
  *"torch.cuda.is_available"*) [ "$ABSENT" = "" ] || exit 1;;
  *"gpu_checks machine"*) printf '{GPU}' > "$last/gpu"; printf 32 > "$last/layers";;
  *"gpu_checks run"*) [ "$WRONG" = "" ] || exit 1;;
  *"-m harness"*)
    [ "$SLOW" = "" ] || sleep 60
    for option; do
      run=${{option#run_dir=}}
      [ "$run" = "$option" ] || {{ mkdir -p "$run"; touch "$run/.lock"; echo "$*" > "$run/study.json"; }}
    done;;
  *test_triton*) [ "$BROKEN" = "" ] || {{ echo "a kernel is wrong"; exit 1; }};;
  *--benchmark-json=*) echo "{{}}" > "${{last#*=}}";;
esac
"""

Run = Callable[..., tuple[int, str]]

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not shutil.which("bash") or not shutil.which("timeout"), reason="needs bash and timeout"
)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    project, python = tmp_path / "project", tmp_path / "python"
    (project / "scripts").mkdir(parents=True)
    shutil.copy(SCRIPT, project / "scripts")
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)

    def run(**settings: str) -> tuple[int, str]:
        given = {"PYTHON": str(python), "OUT": str(tmp_path / "out"), **settings}
        done = subprocess.run(
            ["bash", str(project / "scripts" / "gpu_check.sh")],
            env={**{k: v for k, v in os.environ.items() if k not in ("LAYERS", "ONLY", "LIMIT_S")}, **given},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert not done.stderr, done.stderr
        return done.returncode, done.stdout

    return run


def test_without_a_gpu_it_says_so_at_once(run: Run, tmp_path: Path) -> None:
    status, said = run(ABSENT="1")
    assert status == 1 and said.startswith("no CUDA device") and not (tmp_path / "out" / "summary.txt").exists()


def test_its_stages_fit_into_five_minutes() -> None:
    text = SCRIPT.read_text()
    limits = re.search(r"SECONDS_OF=\(([^)]*)\)", text)
    stages, whole = re.search(r"STAGES=\(([^)]*)\)", text), re.search(r"LIMIT_S:-(\d+)\}", text)
    assert limits and stages and whole
    seconds = {name: int(most) for name, most in re.findall(r"\[(\w+)\]=(\d+)", limits[1])}
    assert list(seconds) == stages[1].split() == re.findall(r"^stage (\w+) ", text, re.MULTILINE)
    assert sum(seconds.values()) <= int(whole[1]) <= 290


def test_the_records_lie_where_they_belong_and_in_an_archive_that_puts_them_there(run: Run, tmp_path: Path) -> None:
    place = tmp_path / "project" / "results" / "reference" / FOLDER
    for stale in ("ladder/gone/0", "another_study"):
        (place / stale).mkdir(parents=True)
    status, said = run()
    assert status == 0 and said.count(" ok ") == 7
    runs = {name: (place / name / "study.json").read_text() for name in ("ladder", "graphs", "load")}
    assert all("model=llama3_8b model.shape.num_layers=32 " in command for command in runs.values())
    assert (place / "another_study").is_dir() and not (place / "ladder" / "gone").exists()
    assert not list(place.glob("*/.lock"))
    assert (place / "kernels.json").is_file() and (place / "logs" / "kernels.log").is_file()
    with tarfile.open(tmp_path / "out" / "records.tar.gz") as archive:
        assert f"results/reference/{FOLDER}/load/study.json" in archive.getnames()
    assert (place / "summary.txt").read_text() == (tmp_path / "out" / "summary.txt").read_text()


def test_a_stage_that_fails_is_told_and_the_others_go_on(run: Run) -> None:
    status, said = run(BROKEN="1", LAYERS="8")
    assert status == 1 and said.count(" ok ") == 6
    assert re.search(r"^kernels +exit 1 ", said, re.MULTILINE) and "a kernel is wrong" in said
    status, said = run(WRONG="1", ONLY="load machine")
    assert status == 1 and re.search(r"^load +exit 1 ", said, re.MULTILINE) and "ladder" not in said


def test_nothing_runs_on_when_the_time_is_over(run: Run) -> None:
    status, said = run(SLOW="1", ONLY="graphs", LIMIT_S="48")  # of which load may need 40
    assert status == 1 and re.search(r"^graphs +exit 124 +\d+ s", said, re.MULTILINE), said
    status, said = run(ONLY="graphs", LIMIT_S="44")
    assert status == 1 and re.search(r"^graphs +no time left", said, re.MULTILINE)


def test_a_cpu_leaves_nothing_among_the_reference_records(run: Run, tmp_path: Path) -> None:
    status, _ = run(DEVICE="cpu", ONLY="")
    assert status == 0 and not (tmp_path / "project" / "results").exists()
    with tarfile.open(tmp_path / "out" / "records.tar.gz") as archive:
        assert "results/reference/dry_run/summary.txt" in archive.getnames()
