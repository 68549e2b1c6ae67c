# shellcheck shell=bash
# Sourced by local.sh and multinode.sh. Leaves PYTHON set; run_torchrun starts torchrun with its arguments and ends with its exit code.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
PYTHON="$ROOT/.venv/bin/python"
[ -x "$PYTHON" ] || PYTHON="$(command -v python3)"

# Ranks for this machine: its GPUs, or two CPU processes.
default_ranks() {
    "$PYTHON" -c 'import torch; print(torch.cuda.device_count() or 2)'
}

run_torchrun() {
    # torchrun gives its ranks this long to save after a signal (versions that do not know it: 30 s)
    export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}"
    "$PYTHON" -m torch.distributed.run "$@" &
    local torchrun=$! code=0
    trap 'kill -TERM "$torchrun"' TERM USR1 INT # torchrun passes TERM on to its ranks, and not every version USR1
    wait "$torchrun" || code=$?
    while kill -0 "$torchrun" 2> /dev/null; do # a trapped signal ends wait early
        code=0
        wait "$torchrun" || code=$?
    done
    return "$code"
}
