"""Ways for a run to end before its last step: a polite signal, or numbers that make no sense."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any


class Diverged(RuntimeError):
    """The loss or the gradient is not finite, on all ranks at the same step; no parameter and no file has been touched by that step."""


def refuse_nonfinite(step: int, loss: float, norm: float, targets: float, lr: float, losses: list[float], last: dict[str, Any]) -> None:
    """Raise Diverged unless the step's numbers are finite.

    ``losses``: each rank's part of the loss (a sum, in nats). ``last``: the metrics of the step before. All arguments are equal on all
    ranks, so all of them raise or none does.
    """
    if targets == 0:
        raise Diverged(f"step {step}: no token of the whole step is to be predicted: look at the data's loss masks and at train.seq_len")
    if math.isfinite(loss) and math.isfinite(norm):
        return
    ranks = [r for r, x in enumerate(losses) if not math.isfinite(x)]
    where = f"the loss of rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))} is" if ranks else "the gradient is"
    before = f"; the step before had loss {last['loss']:.4f} and gradient norm {last['grad_norm']:.3g}" if last else ""
    raise Diverged(
        f"step {step}: loss {loss:.4g}, gradient norm {norm:.4g}: {where} not finite (learning rate {lr:.3g}{before}).\n"
        "  Nothing was written; the last checkpoint is intact. Look at, in this order:\n"
        "  - a gradient norm that grows in metrics.jsonl before this step: lower optim.lr, lengthen schedule.warmup_steps, set optim.clip\n"
        "  - a finite loss with a gradient that is not: try precision=fp32 from the last checkpoint; if that helps it is range, not data\n"
        "  - the same step fails again with another optim.lr: this step's rows; the batch is a pure function of seed and step\n"
        "  - kernel=reference (small shapes) or kernel=torch succeeds where this kernel fails: please report the kernel"
    )


class StopSignals:
    """Within this context SIGTERM, SIGINT and SIGUSR1 (what batch systems send before a time limit) ask for a stop after the current step.

    That is at most one step, the validation that may be due then, and a checkpoint away. Ctrl-C under torchrun arrives twice, from the
    terminal and from torchrun, so a repetition within ``PATIENCE_S`` means the same; a later one ends the process at once, but for
    SIGUSR1, which never does. (torchrun itself kills its ranks 30 s after it has passed a signal on; launch/ allows for more.)
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    PATIENCE_S = 5.0

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._asked_at: float | None = None

    @property
    def requested(self) -> bool:
        """Whether somebody has asked this process to stop."""
        return self._asked_at is not None

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._before = {s: signal.signal(s, self._ask) for s in self.SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._restore()

    def _ask(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._asked_at is None:
            self._asked_at = now
        elif number != signal.SIGUSR1 and now - self._asked_at > self.PATIENCE_S:
            self._restore()
            os.kill(os.getpid(), number)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
