#!/usr/bin/env bash
# Train on several machines: run the same command on each of them.
#   launch/multinode.sh -N 4 -m HOST:29500 name=long model=8b data=memmap data.path=/shared/tokens
# -N nodes; -m HOST:PORT where they meet: the first node, by a name that all of them resolve, and a free port; -n ranks a node (its GPUs
# unless given); -a this node's address, where its own name cannot be resolved. log.dir and data.path must be on shared storage.
# SIGTERM or SIGUSR1 to any one node's script saves a checkpoint and stops all of them; the same command goes on.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

nodes="" meet="" ranks="" address=()
usage() {
    echo "usage: launch/multinode.sh -N NODES -m HOST:PORT [-n RANKS] [-a ADDRESS] key=value ..." >&2
    exit 2
}
while getopts "N:m:n:a:" option; do
    case "$option" in
        N) nodes="$OPTARG" ;;
        m) meet="$OPTARG" ;;
        n) ranks="$OPTARG" ;;
        a) address=(--local-addr "$OPTARG") ;;
        *) usage ;;
    esac
done
shift $((OPTIND - 1))
if [ -z "$nodes" ] || [ -z "$meet" ]; then usage; fi

# (the job's number comes from where it meets: nodes of another job that knock at the same door are turned away)
run_torchrun --nnodes "$nodes" --nproc-per-node "${ranks:-$(default_ranks)}" --rdzv-backend c10d --rdzv-endpoint "$meet" \
    --rdzv-id "ringattn-${meet//[^A-Za-z0-9]/-}" ${address[@]+"${address[@]}"} -m ringattn.train "$@"
