#!/usr/bin/env bash
# Train on this machine: one rank a GPU, or CPU processes where there is none.
#   launch/local.sh experiment=cpu_tiny                 # all GPUs; without any, 2 CPU processes
#   launch/local.sh -n 4 experiment=cpu_tiny            # 4 ranks
# Ctrl-C, SIGTERM and SIGUSR1 save a checkpoint and stop; the same command goes on.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

ranks=""
while getopts "n:" option; do
    case "$option" in
        n) ranks="$OPTARG" ;;
        *) echo "usage: launch/local.sh [-n RANKS] key=value ..." >&2 && exit 2 ;;
    esac
done
shift $((OPTIND - 1))

run_torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node "${ranks:-$(default_ranks)}" -m ringattn.train "$@"
