#!/usr/bin/env bash
# Makes the environment if needed and runs the tests. Arguments go to pytest: scripts/test.sh tests/ring -k window
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
make_environment test

cd "$ROOT"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"  # bit-for-bit tests compare runs of equal thread count
exec "$PYTHON" -m pytest "$@"
