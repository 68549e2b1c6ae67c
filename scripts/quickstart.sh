#!/usr/bin/env bash
# From a fresh clone to a falling loss: makes .venv, installs, and trains a small model on real text over a ring of two processes
# (or of all GPUs found) for about two minutes. Started again, it goes on where it stopped. Further arguments go to the training
# command, e.g. scripts/quickstart.sh name=faster optim.lr=1e-3. Outputs: runs/quickstart (or the name and log.dir given) in the current folder.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
make_environment

STEPS_A_START=250
RANKS="$("$PYTHON" -c 'import torch; print(torch.cuda.device_count() or 2)')"
VIRTUAL=$((RANKS == 1 ? 2 : 1))  # a single GPU plays a ring of two
CHUNKS=$((2 * RANKS * VIRTUAL))
SEQ_LEN=$(((1024 + CHUNKS - 1) / CHUNKS * CHUNKS))

name=quickstart runs=runs
for argument in "$@"; do # the last one of a key counts, as it does for the training command
    case "$argument" in
        name=*) name="${argument#name=}" ;;
        log.dir=*) runs="${argument#log.dir=}" ;;
    esac
done

newest="$(ls "$runs/$name/checkpoints" 2> /dev/null | sed -n 's/^step-0*\([0-9][0-9]*\)$/\1/p' | sort -n | tail -n 1 || true)"
stop_after=$(((${newest:-0} / STEPS_A_START + 1) * STEPS_A_START))

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# (--local-addr: torchrun waits for ever on a machine that cannot resolve its own name)
command=("$PYTHON" -m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node "$RANKS" -m ringattn.train experiment=quickstart
    "parallel.virtual=$VIRTUAL" "train.seq_len=$SEQ_LEN" "train.stop_after=$stop_after" "$@")
echo "\$ ${command[*]##"$ROOT"/}"
"${command[@]}"

if [ -f "$runs/$name/metrics.jsonl" ]; then
    "$PYTHON" - "$runs/$name/metrics.jsonl" << 'SUMMARY'
import json
import sys
lines = [json.loads(line) for line in open(sys.argv[1])]
found = [f"step {x['step']}: {x['val_nats_per_byte']:.3f}" for x in lines if "val_loss" in x]
print("\nValidation, nats a byte:  " + "   ".join(found if len(found) <= 4 else [found[0], "...", *found[-3:]]))
SUMMARY
fi
cat << NEXT

Outputs        $runs/$name: metrics.jsonl, checkpoints/, tensorboard/, config.yaml
Go on          start this script again: it continues where this one stopped
Look           .venv/bin/tensorboard --logdir $runs
A larger ring  .venv/bin/python -m ringattn.train debug=virtual_ring          # a ring of 8 in one process
Your text      .venv/bin/torchrun --standalone --nproc-per-node $RANKS -m ringattn.train name=mine data=text data.path=FOLDER
NEXT
