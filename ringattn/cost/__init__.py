"""The cost model: what a training step computes, holds, moves and takes, for any config and machine. Plain arithmetic, no torch.

    flops     parameters, visible pairs, FLOPs in three conventions, MFU
    work      a config as the numbers that cost something
    memory    peak bytes of a rank by part
    machine   profiles of GPUs and their links, built in or measured
    time      seconds of a step by part, communication that stays exposed
    papers    formulas of the papers that this project follows, for comparison

One model for MFU, the planner, the headers of runs and the benchmarks.
"""

from ringattn.cost import papers
from ringattn.cost.flops import (
    PEAK_FLOPS,
    Convention,
    Flops,
    Policy,
    block_parameters,
    mfu,
    parameters,
    peak_flops,
    step_flops,
    visible_pairs,
)
from ringattn.cost.machine import GIB, MACHINES, Machine, find_machine, machine_of
from ringattn.cost.memory import STATE_BUCKET, STATE_SLOTS, Memory, host_bytes, host_state_bytes, memory, saved_bytes_per_token
from ringattn.cost.time import Hop, StepTime, step_time
from ringattn.cost.work import LOGITS_BYTES, Work, logit_rows, work_of

__all__ = [
    "Convention", "Flops", "GIB", "Hop", "LOGITS_BYTES", "MACHINES", "Machine", "Memory", "PEAK_FLOPS", "Policy",
    "STATE_BUCKET", "STATE_SLOTS", "StepTime", "Work",
    "block_parameters", "find_machine", "host_bytes", "host_state_bytes", "logit_rows", "machine_of", "memory", "mfu", "papers",
    "parameters", "peak_flops", "saved_bytes_per_token", "step_flops", "step_time", "visible_pairs", "work_of",
]
