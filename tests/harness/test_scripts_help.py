"""`--help` of every script says what it does, and nothing else happens."""

from __future__ import annotations

import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
RUN = [path for path in sorted(SCRIPTS.rglob("*.py")) if "__main__" in path.read_text()]


@pytest.mark.parametrize("path", RUN, ids=lambda path: path.relative_to(SCRIPTS).as_posix())
def test_help_of_a_script_is_what_it_does(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [path.name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    shown = capsys.readouterr()
    assert ended.value.code == 0 and shown.err == "" and shown.out.startswith("usage: ")
    assert len(" ".join(shown.out.split())) > 200


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
@pytest.mark.parametrize("path", sorted(SCRIPTS.glob("*.sh")), ids=lambda path: path.name)
def test_help_of_a_shell_script_is_its_heading(path: Path, tmp_path: Path) -> None:
    done = subprocess.run(["bash", str(path), "--help"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stderr == "" and list(tmp_path.iterdir()) == []
    assert f"scripts/{path.name} [" in done.stdout
    heading = path.read_text().partition("\nset ")[0].splitlines()[1:]
    assert done.stdout.splitlines() == [line.removeprefix("#").removeprefix(" ") for line in heading]
