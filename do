#!/bin/sh
# One entry point for a checkout: finds a Python, makes .venv, installs the tested versions into it, runs a command.
# The set-up is repeated only when pyproject.toml, constraints.txt or the wanted extras change.
set -eu
cd "$(dirname "$0")"

usage() {
    cat <<'TEXT'
usage: ./do COMMAND [ARGUMENTS]

  demo         train the small language model, compare with jax.nn.dot_product_attention, save a plot
  test         ruff, pyrefly, import contracts and the tests that need no GPU: of parametrised ones a sample of the cases;
               arguments go to pytest
  test-all     the same with all cases, and the long tests that `test` leaves out; arguments go to pytest
  test-newest  a selection of the tests with the newest versions that pyproject.toml allows; arguments go to pytest
  test-oldest  the same with the oldest versions that it allows
  test-at      two small tests with the versions that follow, as in: ./do test-at jax==0.12.0 torch==2.12.0
  gpu-test     the tests that need a CUDA GPU, several at once; arguments go to pytest
  sanitize     every kernel under compute-sanitizer's memcheck, racecheck and initcheck (needs a CUDA GPU)
  doctor       what this machine has, and which implementations can run on it
  bench        benchmarks and experiments, as `./do bench moba --plot`; most need a CUDA GPU
  docs         run the notebooks and build the documentation into build/docs
  setup        only install everything that the tests need

A Python 3.12, 3.13 or 3.14 is looked for on PATH, among pyenv's versions and through uv; PYTHON=/path/to/python decides.
TEXT
}

say() { printf '%s\n' "do: $*" >&2; }

# Newer versions have no wheels of the versions that constraints.txt names.
version_is_supported() {
    "$1" -c 'import sys; sys.exit(not (3, 12) <= sys.version_info[:2] <= (3, 14))' >/dev/null 2>&1
}

python_is_usable() {
    version_is_supported "$1" || return 1
    "$1" -c 'import ensurepip, venv' >/dev/null 2>&1 && return 0
    incomplete=$1
    return 1
}

# Sets $python, or says what to install and exits. 3.12 comes first: it is the version that constraints.txt was tested with.
find_python() {
    incomplete=
    if [ -n "${PYTHON:-}" ]; then
        python=$PYTHON
        python_is_usable "$python" && return
        say "PYTHON=$PYTHON is not a Python 3.12, 3.13 or 3.14 with the venv and ensurepip modules; unset it or name another."
        exit 1
    fi
    for python in python3.12 python3.13 python3.14 python3 python; do
        python_is_usable "$python" && return
    done
    for version in 3.12 3.13 3.14; do
        for python in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$version"*/bin/python3; do
            python_is_usable "$python" && return
        done
    done
    if command -v uv >/dev/null 2>&1; then
        python=$(uv python find --no-project '>=3.12,<3.15' 2>/dev/null || true)
        python_is_usable "$python" && return
        say "no Python 3.12 found; uv installs one"
        uv python install 3.12 && python=$(uv python find --no-project 3.12)
        python_is_usable "$python" && return
    fi
    if [ -n "$incomplete" ]; then
        say "$incomplete lacks the venv or ensurepip module; on Debian and Ubuntu: sudo apt install python3-venv"
    else
        say "no Python 3.12, 3.13 or 3.14 found. Install one, for example:"
        say "  sudo apt install python3.12 python3.12-venv    (Ubuntu 24.04 or later)"
        say "  brew install python@3.12                       (macOS)"
        say "  curl -LsSf https://astral.sh/uv/install.sh | sh && uv python install 3.12"
    fi
    exit 1
}

gpu_is_present() { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; }

# fingerprint EXTRAS: what an installation with these extras depends on; the folder, because an editable install names it.
fingerprint() { { echo "$1"; pwd; cat pyproject.toml constraints.txt; } | cksum; }

is_installed() { [ -x .venv/bin/python ] && [ "$(cat ".venv/installed-$1" 2>/dev/null)" = "$(fingerprint "$1")" ]; }

# Sets $uv for the environment in .venv, or fails. uv unpacks packages several times as fast as pip.
find_uv() {
    # uv does not read the settings of pip, which may name another index.
    if .venv/bin/python -m pip config list 2>/dev/null | grep -q '\.index-url='; then
        return 1
    fi
    uv=$(command -v uv) && return
    .venv/bin/python -m pip install --disable-pip-version-check --quiet --no-compile -c constraints.txt uv || return 1
    uv=.venv/bin/uv
    [ -x "$uv" ]
}

# install EXTRAS: brings .venv to the tested versions of the package's dependencies with these extras.
install() {
    is_installed "$1" && return
    if ! { [ -x .venv/bin/python ] && version_is_supported .venv/bin/python; }; then
        find_python
        say "making .venv with $("$python" --version) ($(command -v "$python"))"
        "$python" -m venv --clear .venv
    fi
    say "installing blockdiag[$1] (the first time takes a few minutes)"
    # Modules are compiled when they are imported. Compiling all of them would take more than a minute.
    if ! { find_uv && "$uv" pip install --quiet --python .venv/bin/python -c constraints.txt -e ".[$1]"; }; then
        .venv/bin/python -m pip install --disable-pip-version-check --quiet --no-compile -c constraints.txt -e ".[$1]"
    fi
    fingerprint "$1" >".venv/installed-$1"
}

# The tests lower for CUDA and compile kernels without a GPU, so they want the CUDA plugin everywhere.
test_extras=test,cuda

install_to_run() {
    if gpu_is_present; then
        is_installed "$test_extras" || install cli,flax,cuda
    elif is_installed "$test_extras"; then
        # JAX would look for a GPU with the plugin that the tests brought, and print why it finds none.
        export JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}"
    else
        install cli,flax
    fi
}

# The lower bounds of pyproject.toml as constraints for pip.
oldest_versions() {
    "$1" - <<'PYTHON'
import re
import tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
extras = project["optional-dependencies"]
for requirement in [*project["dependencies"], *(each for name in ("cli", "cuda", "flax", "torch") for each in extras[name])]:
    if bound := re.match(r"([\w.-]+)>=([\w.]+)", requirement):
        print(f"{bound[1]}=={bound[2]}")
PYTHON
}

# test_versions FOLDER CONSTRAINTS ARGUMENTS: the selected tests with versions that pip chooses within the constraints.
test_versions() {
    folder=$1
    constraints=$2
    shift 2
    if ! { [ -x "$folder/bin/python" ] && [ -f "$folder/constraints.txt" ] &&
        [ "$(cat "$folder/constraints.txt")" = "$constraints" ]; }; then
        find_python
        "$python" -m venv --clear "$folder"
        printf '%s\n' "$constraints" >"$folder/constraints.txt"
    fi
    say "installing into $folder (takes a few minutes)"
    "$folder/bin/python" -m pip install --disable-pip-version-check --quiet --no-compile \
        --upgrade --upgrade-strategy eager -c "$folder/constraints.txt" -e ".[cli,cuda,flax,torch,versions]"
    "$folder/bin/python" -m pip list --disable-pip-version-check |
        grep -E '^(python|jax|jaxlib|jax-cuda13-plugin|triton|torch|flax|optax|jaxtyping|numpy) ' >&2
    export JAX_PLATFORMS=cpu
    # Only files with marked tests, because others import what is not installed.
    exec "$folder/bin/python" -m pytest -n logical --maxprocesses 4 --dist worksteal -m "versions and not gpu" \
        $(grep -rl 'mark\.versions' tests --include='test_*.py') "$@"
}

# Without bytecode, every process of the tests would compile the sources of JAX and torch again.
unset PYTHONDONTWRITEBYTECODE

command=${1:-help}
[ $# -gt 0 ] && shift
case $command in
demo | doctor)
    install_to_run
    exec .venv/bin/python -m blockdiag "$command" "$@"
    ;;
bench)
    install "$test_extras"
    exec .venv/bin/python -m benchmarks "$@"
    ;;
test | test-all)
    install "$test_extras"
    .venv/bin/ruff check .
    .venv/bin/ruff format --check .
    .venv/bin/pyrefly check
    .venv/bin/lint-imports
    # On a machine with a GPU too, so that the command does the same thing everywhere.
    export JAX_PLATFORMS=cpu
    selected="not gpu and not multigpu"
    if [ "$command" = test ]; then
        selected="$selected and not exhaustive"
        set -- --sample "$@"
    fi
    # Few processes, because each holds JAX, torch and Triton; a later -n among the arguments overrides this one.
    exec .venv/bin/python -m pytest -n logical --maxprocesses 4 --dist worksteal -m "$selected" "$@"
    ;;
test-newest)
    test_versions .venv-newest "" "$@"
    ;;
test-oldest)
    find_python
    test_versions .venv-oldest "$(oldest_versions "$python")" "$@"
    ;;
test-at)
    [ $# -gt 0 ] || { usage >&2 && exit 2; }
    test_versions .venv-at "$(printf '%s\n' "$@")" -k "block_diagonal or installed"
    ;;
gpu-test)
    install "$test_extras"
    # As many processes as the memory of one GPU holds; tests/conftest.py tells them how to share it. Compiled kernels
    # are shared through the caches of Triton and torch. A later -n among the arguments overrides this one.
    exec .venv/bin/python -m pytest -n logical --maxprocesses 12 --dist loadgroup -m "gpu or multigpu" "$@"
    ;;
sanitize)
    install "$test_extras"
    exec .venv/bin/python tests/gpu_scripts/sanitize.py "$@"
    ;;
docs)
    is_installed "$test_extras" || install docs
    # Notebooks run as on a machine without a GPU, and the site is the same everywhere.
    export JAX_PLATFORMS=cpu
    exec .venv/bin/python -m sphinx -j auto -W --keep-going -n -b html -d build/doctrees docs build/docs "$@"
    ;;
setup)
    install "$test_extras"
    ;;
help | -h | --help)
    usage
    ;;
*)
    usage >&2
    exit 2
    ;;
esac
