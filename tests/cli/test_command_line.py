"""`python -m blockdiag` as a user starts it, and the `do` script of a checkout."""

import itertools
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from typer.testing import CliRunner

from benchmarks.app import OPS
from benchmarks.command import BENCHMARKS
from blockdiag.cli.app import app

ROOT = Path(__file__).parent.parent.parent


def start(*arguments: str, package: str = "blockdiag") -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ, JAX_PLATFORMS="cpu", COLUMNS="120", NO_COLOR="1")
    command = [sys.executable, "-m", package, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, env=environment)


@pytest.mark.parametrize(
    ("package", "names"),
    [
        ("blockdiag", ("demo", "doctor")),
        ("benchmarks", ("all", "moba", "paged", "fuse", "devices", "recall", "gallery-page")),
    ],
)
def test_help_lists_the_commands(package, names):
    result = start("--help", package=package)
    assert result.returncode == 0, result.stderr
    for name in names:
        assert name in result.stdout


def test_bench_command_of_the_package_names_the_benchmarks_of_the_checkout():
    result = start("bench", "moba")
    assert result.returncode != 0
    assert "python -m benchmarks moba" in result.stderr and "checkout" in result.stderr


@pytest.mark.parametrize(
    ("package", "command", "option"),
    [
        ("blockdiag", "demo", "--attention"),
        ("blockdiag", "doctor", "--json"),
        ("benchmarks", "moba", "--smoke"),
        ("benchmarks", "recall", "--trials"),
        ("benchmarks", "gallery-page", "--variants"),
    ],
)
def test_each_command_parses_its_own_options(package, command, option):
    result = start(command, "--help", package=package)
    assert result.returncode == 0, result.stderr
    assert f"python -m {package}" in result.stdout
    assert option in result.stdout


def test_every_benchmark_is_a_command():
    assert set(OPS) == {"all", *BENCHMARKS}


def test_unknown_option_is_an_error():
    result = start("doctor", "--no-such-option")
    assert result.returncode == 2
    assert "--no-such-option" in result.stderr


def test_demo_with_a_missing_package_names_it(monkeypatch):
    for module in ("demo", "training_report"):
        monkeypatch.delitem(sys.modules, f"blockdiag.cli.{module}", raising=False)
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == 1
    assert "rich" in str(result.exception)
    assert "pip install" in str(result.exception)


@pytest.fixture
def checkout(tmp_path) -> Path:
    """Return a folder with the files that the script reads, so that nothing is installed into the real checkout."""
    for name in ("do", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def run_script(checkout: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["./do", *arguments],
        cwd=checkout,
        capture_output=True,
        text=True,
        timeout=120,
        env={"PATH": os.defpath, "HOME": str(checkout), **environment},
    )


def fake_program(folder: Path, name: str, body: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / name
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    return program


def tools(folder: Path) -> str:
    """Return a PATH with the programs that the script calls, but without Python."""
    folder.mkdir()
    for name in ("sh", "dirname", "cat", "cksum", "grep"):
        (folder / name).symlink_to(shutil.which(name))
    return str(folder)


def test_script_without_command_prints_its_usage(checkout):
    result = run_script(checkout)
    assert result.returncode == 0
    assert "./do COMMAND" in result.stdout
    assert run_script(checkout, "no-such-command").returncode == 2


def test_script_says_what_to_install_without_a_python(checkout, tmp_path):
    result = run_script(checkout, "setup", PATH=tools(tmp_path / "tools"))
    assert result.returncode == 1
    assert "no Python 3.12, 3.13 or 3.14 found" in result.stderr
    assert not (checkout / ".venv").exists()


def test_script_refuses_a_python_that_is_too_old(checkout, tmp_path):
    old = fake_program(tmp_path / "bin", "python3", "exit 1")
    result = run_script(checkout, "setup", PYTHON=str(old))
    assert result.returncode == 1
    assert f"PYTHON={old}" in result.stderr


def test_script_finds_a_python_among_pyenv_versions(checkout, tmp_path):
    # This fake interpreter answers the script's questions and shows that it was asked for a venv.
    body = 'case "$*" in *venv\\ --clear*) echo "venv wanted" >&2; exit 7;; esac; echo "Python 3.12.0"'
    fake_program(tmp_path / "pyenv" / "versions" / "3.12.0" / "bin", "python3", body)
    result = run_script(checkout, "setup", PATH=tools(tmp_path / "tools"), PYENV_ROOT=str(tmp_path / "pyenv"))
    assert result.returncode == 7
    assert "venv wanted" in result.stderr
    assert "versions/3.12.0/bin/python3" in result.stderr


FAKE_PYTHON = """
case "$*" in
    *venv\\ --clear*) for folder; do :; done; mkdir -p "$folder/bin"; cp "$0" "$folder/bin/python";;
    *pip\\ install*) echo "$*" >>calls;;
    *pip\\ list*) printf 'jax 9.9\\npytest 9.9\\n';;
    *pytest*) echo "$*" >>calls; exit 7;;
    -) exec REAL -;;
esac"""


@pytest.fixture
def fake_python(tmp_path) -> str:
    """Return a fake interpreter that creates environments, records calls of pip and pytest, and fails the tests."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_all.py").write_text("@pytest.mark.versions\n")
    (tmp_path / "tests" / "test_other.py").write_text("")
    return str(fake_program(tmp_path / "bin", "python3", FAKE_PYTHON.replace("REAL", sys.executable)))


def runtime_requirements() -> list[Requirement]:
    """Return the requirements of users in pyproject.toml that give versions."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    texts = [*project["dependencies"], *itertools.chain(*(extras[name] for name in ("cli", "cuda", "flax", "torch")))]
    return [requirement for requirement in map(Requirement, texts) if requirement.specifier]


def test_runtime_dependencies_have_no_upper_bound():
    operators = {specifier.operator for requirement in runtime_requirements() for specifier in requirement.specifier}
    assert operators == {">="}


def test_script_runs_the_marked_tests_with_the_newest_versions(checkout, fake_python):
    result = run_script(checkout, "test-newest", "-x", PYTHON=fake_python)
    assert result.returncode == 7 and "jax 9.9" in result.stderr and "pytest 9.9" not in result.stderr
    installed, run = (checkout / "calls").read_text().splitlines()
    assert "--upgrade" in installed and "cuda" in installed and "torch" in installed and "docs" not in installed
    assert (checkout / ".venv-newest" / "constraints.txt").read_text().strip() == ""
    assert "-m versions and not gpu" in run and run.endswith("tests/test_all.py -x")


def test_script_installs_the_lower_bounds_of_every_dependency(checkout, fake_python):
    assert run_script(checkout, "test-oldest", PYTHON=fake_python).returncode == 7
    constraints = (checkout / ".venv-oldest" / "constraints.txt").read_text().split()
    assert constraints == [f"{each.name}{each.specifier}".replace(">=", "==") for each in runtime_requirements()]
    assert {"jax", "triton", "torch", "numpy", "flax"} <= {each.partition("==")[0] for each in constraints}
    assert "-c .venv-oldest/constraints.txt" in (checkout / "calls").read_text()


def test_script_makes_another_environment_for_other_versions(checkout, fake_python):
    assert run_script(checkout, "test-at", PYTHON=fake_python).returncode == 2
    for versions in (["jax==0.12.0", "torch==2.12.0"], ["jax==0.11.2"]):
        assert run_script(checkout, "test-at", *versions, PYTHON=fake_python).returncode == 7
        assert (checkout / ".venv-at" / "constraints.txt").read_text().split() == versions
    assert "-k block_diagonal or installed" in (checkout / "calls").read_text()


def test_script_does_not_install_twice(checkout, tmp_path):
    # The first .venv/bin/python fails when pip runs. After the second one succeeds, the script records the installation
    # and does not call the third one.
    fake_program(checkout / ".venv" / "bin", "python", 'case "$*" in *pip*) exit 9;; esac')
    assert run_script(checkout, "setup").returncode == 9
    fake_program(checkout / ".venv" / "bin", "python", "exit 0")
    assert run_script(checkout, "setup").returncode == 0
    fake_program(checkout / ".venv" / "bin", "python", "exit 9")
    assert run_script(checkout, "setup").returncode == 0
    (checkout / "constraints.txt").write_text("jax==0.0\n")
    assert run_script(checkout, "setup", PATH=tools(tmp_path / "tools")).returncode != 0


@pytest.mark.parametrize(
    ("index", "status", "installers"),
    [("", 0, ["uv"]), ("", 2, ["uv", "pip"]), ("global.index-url='https://packages.example'", 0, ["pip"])],
)
def test_script_installs_with_uv_unless_it_fails_or_pip_has_another_index(
    checkout, tmp_path, index, status, installers
):
    record = 'case "$*" in *"pip config list"*) echo "$INDEX";; *pip*install*) echo "$NAME $*" >>calls;; esac'
    fake_program(checkout / ".venv" / "bin", "python", f"NAME=pip\n{record}")
    fake_program(tmp_path / "tools" / "uv", "uv", f"NAME=uv\n{record}\nexit {status}")
    path = f"{tmp_path / 'tools' / 'uv'}:{os.defpath}"
    assert run_script(checkout, "setup", PATH=path, INDEX=index).returncode == 0
    calls = (checkout / "calls").read_text().splitlines()
    assert [call.split()[0] for call in calls] == installers
    assert all("-c constraints.txt -e .[test,cuda]" in call for call in calls)
