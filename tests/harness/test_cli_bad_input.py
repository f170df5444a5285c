"""Bad input: one line that names the option, its value, what is allowed and the nearest choice; exit status 2."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest

from harness.__main__ import main
from harness.check import ALLOWED_TARGETS, check_targets, check_values
from harness.errors import BadInput
from harness.study import compose_study
from impls.build import ALLOWED_PREFIXES

ROOT = Path(__file__).parents[2]
NONE = "study=none"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["batching=statik"], ["batching=statik", "allowed: ", "static", "did you mean static?"]),
        (["batching="], ["batching=", "static"]),
        (["workload/arrivals=poison"], ["workload/arrivals=poison", "did you mean poisson?"]),
        (["workload/arival=poisson"], ["workload/arival", "did you mean workload/arrivals?"]),
        (["batchng=static"], ["batchng", "no such option", "did you mean batching?"]),
        ([NONE, "batching.max_num_seq=4"], ["batching.max_num_seq", "did you mean batching.max_num_seqs?"]),
        ([NONE, "batching={a:1}"], ["batching={a:1}", "static"]),
        ([NONE, "price.per_hour=abc"], ["price.per_hour=abc", "a number"]),
        ([NONE, "study.arms={" + 300 * "a" + ":{set:[]}}"], ["a folder's", "at most 200 bytes"]),
        ([NONE, "seed=null"], ["seed=None", "a whole number"]),
        ([NONE, "study.trials=1000000"], ["study.trials=1000000", "nearest: 10000"]),
        ([NONE, "study.name=../elsewhere"], ["study.name=../elsewhere", "a folder's"]),
        ([NONE, "study.trials=null"], ["study.trials=null", "a number"]),
        ([NONE, "study.stall_s=null"], ["study.stall_s=null", "a number"]),
        ([NONE, "study.trials=0"], ["study.trials=0", "at least 1", "nearest: 1"]),
        ([NONE, "study.trials=abc"], ["study.trials=abc", "a number", "for example 1"]),
        ([NONE, "study.trials=1.5"], ["study.trials=1.5", "a whole number"]),
        ([NONE, "workload.arrivals.rate=-1"], ["workload.arrivals.rate=-1", "above 0"]),
        ([NONE, "workload.arrivals.rate=1,nan"], ["workload.arrivals.rate=nan", "finite"]),
        ([NONE, "workload.arrivals.rate=interval(1,2)"], ["interval(1,2)", "allowed: workload.arrivals.rate=a,b"]),
        ([NONE, "batching.max_num_seqs=many"], ["batching.max_num_seqs=many", "a number"]),
        ([NONE, "isolation=proces"], ["isolation=proces", "inline, process"]),
        ([NONE, "seed=${nothing}"], ["seed", "nothing"]),
        ([NONE, "seed=1", "seed=2"], ["seed: given twice"]),
        ([NONE, "seed=1,2"], ["seed", "same in every arm"]),
        (["batching=static"], ["batching=static", "arms static, continuous", "set batching"]),
        ([NONE, "study.baseline=x"], ["study.baseline=x", "single"]),
        ([NONE, "study.arms=[1]"], ["study.arms=[1]", "for example"]),
        ([NONE, 'study.arms={a:{set:["batching=statik"]}}'], ["arm a: batching=statik", "did you mean static?"]),
        ([NONE, 'study.arms={a:{set:["batching=static"],versus:b}}'], ["study.arms.a.versus=b", "allowed: a"]),
        ([NONE, "study.arms={a:{set:[batching=static]}}"], ["study.arms=", "quoted"]),
        ([NONE, "batching._target_=os.system"], ["_target_ comes from conf/ only"]),
        ([NONE, "+batching._target_=os.system"], ["every option is declared in conf/"]),
        ([NONE, "batching.name=static"], ["name comes from conf/ only", "allowed: batching=<option>"]),
        ([NONE, "workload.arrivals.name=burst"], ["allowed: workload/arrivals=<option>"]),
        ([NONE, "study.arms={a:{set:['batching.name=static']}}"], ["arm a", "name comes from conf/ only"]),
        ([NONE, "kv_cache.blok_size=4"], ["allowed: kv_cache.block_size, kv_cache.budget; did you mean"]),
        ([NONE, "study.arms={a:{set:['workload.sampling={_target_:os.system}']}}"], ["_target_ comes from conf/ only"]),
        ([NONE, "+foo=1"], ["+foo=1", "every option is declared in conf/"]),
        ([NONE, "~proposer"], ["~proposer", "every option is declared in conf/"]),
        (["hydra/launcher=basik"], ["hydra/launcher=basik", "did you mean basic?"]),
        (["hydra.mode=RUN"], ["hydra.mode=RUN", "the harness sets this itself"]),
        (["hydra.searchpath=[/elsewhere]"], ["hydra.searchpath", "the harness sets this itself"]),
        (["hydra/sweeper=basic"], ["hydra/sweeper=basic", "the harness sets this itself"]),
        (["--config-dir=/elsewhere"], ["--config-dir", "no such flag"]),
        (["--studdy", "x"], ["--studdy", "no such flag"]),
        ([NONE, "a b"], ["not an option", "key=value"]),
        (
            [NONE, "batching=static", "batching.timeout_s=70"],
            ["batching.timeout_s=70", "half of study.stall_s=120.0", "nearest: 60"],
        ),
        (
            [NONE, "batching=continuous,static", "study.stall_s=0.05"],
            ["arm static: batching.timeout_s=0.05", "half of study.stall_s=0.05", "nearest: 0.025"],
        ),
    ],
)
def test_one_line_that_helps(
    arguments: list[str], said: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: ") and captured.err.count("\n") == 1
    for part in said:
        assert part in captured.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["workload=trace", "workload.path=nowhere.jsonl"], "nowhere.jsonl"),
        (
            [
                "workload=chat",
                "workload/prompts=random",
                "workload/prompt_length=uniform",
                "workload.prompt_length.low=1000",
            ],
            "low",
        ),
        (["kv_cache.budget=3 apples", "workload/prompts=random"], "kv_cache.budget=3 apples"),
    ],
)
def test_what_only_the_parts_know_is_one_line_too(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([NONE, "model=tiny", "device=cpu", "attention=sdpa", *(f"{a}" for a in arguments)]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["arrivals=onoff", "arrivals=poisson"])
def test_a_rate_that_no_run_reaches_the_end_of_is_refused_at_once(option: str, capsys: Any, tmp_path: Path) -> None:
    command = [NONE, "model=tiny", "device=cpu", "attention=sdpa", f"workload/{option}", f"run_dir={tmp_path / 'run'}"]
    assert main([*command, "workload.arrivals.rate=1e-300"]) == 2
    error = capsys.readouterr().err
    assert "workload.arrivals.rate=1e-300: must be from 1e-06 to 1e+09" in error and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["file/cache", "/proc/cache"])
def test_a_cache_that_cannot_be_written_is_told_before_anything_runs(
    place: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("a file")
    monkeypatch.setenv("HARNESS_CACHE", place)
    assert main([NONE, "model=tiny", "device=cpu", "attention=sdpa"]) == 2
    error = capsys.readouterr().err
    assert f"HARNESS_CACHE={place}: cannot be written (" in error and "allowed: HARNESS_CACHE=" in error
    assert error.count("\n") == 1 and [path.name for path in tmp_path.iterdir()] == ["file"]


def test_ctrl_c_while_it_is_still_imported_is_no_traceback(tmp_path: Path) -> None:
    """Its first import from elsewhere takes long here, and is where Ctrl-C strikes."""
    (tmp_path / "hydra.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    process = subprocess.Popen(
        [sys.executable, "-m", "harness"],
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == -signal.SIGINT  # which a shell shows as 130


def test_the_traceback_is_shown_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(BadInput, match="statik"):
        main(["batching=statik"])


def test_from_any_folder_as_a_program(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "harness", "batching=statik"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1 and "did you mean static?" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_help_has_a_line_for_every_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for group in (p.name for p in (ROOT / "conf").iterdir() if p.is_dir()):
        (line,) = [line for line in lines if line.startswith(f"  {group} ")]
        for option in (ROOT / "conf" / group).glob("*.yaml"):
            assert option.stem in line


class Option:
    def __init__(self, size: int, ratio: float = 1.0, kind: Literal["a", "b"] = "a", names: list[str] | None = None):
        pass


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"size": "x"}, "axis.size=x: must be a whole number"),
        ({"size": True}, "axis.size=true: must be a whole number"),
        ({"size": 1, "ratio": "fast"}, "axis.ratio=fast: must be a number"),
        ({"size": 1, "kind": "c"}, "axis.kind=c: must be one of a, b"),
        ({"size": 1, "names": "x"}, "axis.names=x: must be a list or null"),
        ({"size": 1, "names": [1]}, "axis.names=[1]: must be a list or null"),
        ({"size": 1, "sise": 2}, "axis.sise: no such option"),
        ({"size": 1, "ratio": 2, "kind": "b", "names": ["x"]}, None),
    ],
)
def test_values_are_held_against_what_the_class_declares(values: dict[str, Any], said: str | None) -> None:
    config = {"axis": {"name": "x", "_target_": f"{__name__}.Option", **values}}
    if said is None:
        check_values(config)
        return
    with pytest.raises(BadInput) as raised:
        check_values(config)
    assert said in str(raised.value)


def test_a_target_outside_the_project_is_refused_however_deep() -> None:
    assert ALLOWED_TARGETS == ALLOWED_PREFIXES
    check_targets({"a": {"_target_": "impls.x.Y", "b": {"_target_": "workloads.z.W"}}})
    with pytest.raises(BadInput, match=r"a\.b\._target_=os\.system: must start with one of"):
        check_targets({"a": {"_target_": "impls.x.Y", "b": {"_target_": "os.system"}}})


@pytest.mark.parametrize("study", ["aa", "controls", "ladder", "none", "smoke"])
def test_every_study_as_shipped_composes(study: str) -> None:
    composed = compose_study([f"study={study}"])
    assert composed.whole["study"]["name"] == study
    for arm in composed.arms:
        assert composed.configs[arm.name]["model"]["name"] == "smollm2_135m"
