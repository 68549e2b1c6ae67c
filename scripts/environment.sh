# Sourced by the other scripts: makes .venv beside the source tree if it is missing, and installs ringattn into it (editable).
#   make_environment          what training needs
#   make_environment test     with the tools of the tests
# TORCH sets what pip installs as torch (default: torch==2.13.0 triton==3.6.0 where no NVIDIA driver is found, torch>=2.9 otherwise).
# Leaves ROOT and PYTHON set. Needs bash and Python 3.11 or newer; runs from any folder, any number of times.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
PYTHON="$ROOT/.venv/bin/python"

find_python() {
    local candidate
    for candidate in python3.13 python3.12 python3.11 python3; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2> /dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "ringattn needs Python 3.11 or newer with the venv module (on Debian: apt-get install python3-venv)" >&2
    return 1
}

make_environment() {
    local extra="${1:-}"
    local wanted="${extra:-base}" stamp="$ROOT/.venv/.ringattn-${1:-base}"
    # The stamp holds what was installed for which pyproject.toml: nothing is done twice, and a change is noticed.
    local state
    state="$(cksum < "$ROOT/pyproject.toml") $ROOT"
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$state" ] && "$PYTHON" -c 'import torch, ringattn' 2> /dev/null; then
        return
    fi
    if ! "$PYTHON" -m pip --version > /dev/null 2>&1; then
        echo "making $ROOT/.venv" >&2
        local python
        python="$(find_python)" || return 1
        "$python" -m venv "$ROOT/.venv"
    fi
    if ! "$PYTHON" -c 'import torch' 2> /dev/null; then
        local torch=("${TORCH:-torch>=2.9}")
        if [ -z "${TORCH:-}" ] && ! command -v nvidia-smi > /dev/null; then
            # A CPU build brings no triton of its own; this is the one whose compiler the GPU kernels are tuned and tested with.
            torch=(torch==2.13.0 triton==3.6.0)
        fi
        echo "installing ${torch[*]} (a few minutes)" >&2
        "$PYTHON" -m pip install -qq --disable-pip-version-check "${torch[@]}"
    fi
    echo "installing ringattn and what it needs ($wanted)" >&2
    "$PYTHON" -m pip install -qq --disable-pip-version-check -e "$ROOT${extra:+[$extra]}"
    echo "$state" > "$stamp"
}
