"""What fits, and how fast: the keys are those of training, and three of the planner's own.

    python scripts/plan.py model=8b machine=h200 gpus=8 wish=longest
    python scripts/plan.py model=1b machine=h200 gpus=1 train.seq_len=131072             # that length, at best speed
    python scripts/plan.py model=8b machine=mine.json gpus=16 train.seq_len=1048576 activation=block

``machine``: a100, h100, h200, b200 or a file of scripts/profile_machine.py. ``gpus``: ranks. ``wish``: fastest (default) or longest.
Also ``vocab=`` where the model takes its vocabulary from the data (default 128256), ``documents=`` the mean length that attention
stays within (default: whole rows) and ``picture=`` the file of the bar (default plan.png; none: no file). Keys of training given here
stay as they are; the planner chooses the others. Exit codes: 0 a plan, 2 refused, 3 nothing fits (the nearest that does is shown).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ringattn.compose import compose_keys
from ringattn.plan_report import draw, report
from ringattn.planner import NothingFits, Plan, plan
from ringattn.train import config_folder
from ringattn.typed import ConfigError, Problems

OWN = {"machine": "h200", "gpus": "1", "wish": "fastest", "vocab": "128256", "documents": "0", "picture": "plan.png"}
DONE, REFUSED, NOTHING = 0, 2, 3


def main(arguments: list[str]) -> int:
    """The command line; returns the exit code."""
    if any(a in ("-h", "--help") for a in arguments):
        print(__doc__)
        return DONE
    own = OWN | {key: value for key, _, value in (a.partition("=") for a in arguments) if key in OWN}
    rest = [a for a in arguments if a.partition("=")[0] not in OWN]
    try:
        found, code = make(own, rest), DONE
    except ConfigError as error:
        print(error, file=sys.stderr)
        return REFUSED
    except NothingFits as error:
        print(f"{error}\n")
        if error.fitting is None:
            return NOTHING
        print("the nearest that fits:\n")
        found, code = error.fitting, NOTHING
    except ValueError as error:
        print(error, file=sys.stderr)
        return REFUSED
    print(report(found))
    if own["picture"] != "none":
        draw([found], Path(own["picture"]))
        print(f"picture: {own['picture']}")
    return code


def make(own: dict[str, str], rest: list[str]) -> Plan:
    """The plan for keys as typed. Raises what :func:`ringattn.planner.plan` raises, ConfigError for keys that cannot be."""
    problems = Problems()
    numbers = {}
    for key, low in (("gpus", 1), ("vocab", 1), ("documents", 0)):
        if not own[key].isdigit() or int(own[key]) < low:
            problems.add(f"{key}={own[key]}: must be a whole number from {low}")
        else:
            numbers[key] = int(own[key])
    raw = compose_keys(rest, config_folder(), problems)
    if problems.messages:
        raise ConfigError(problems.messages)
    typed = {key: value for key, _, value in (a.partition("=") for a in rest)}
    nested = ("activation", "kernel", "precision", "compile", "deterministic")
    fixed: dict[str, Any] = {key: look_up(raw, key) if "." in key or key in nested else value for key, value in typed.items()}
    if own["wish"] == "longest":
        fixed.pop("train.seq_len", None)
    if "train.rows" not in fixed:
        raw["train"]["rows"] = raw["train"]["micro_rows"]
    return plan(
        raw, machine=own["machine"], gpus=numbers["gpus"], wish=own["wish"], fixed=fixed, vocab_size=numbers["vocab"],
        documents=numbers["documents"], precision_bytes={"fp64": 8, "fp32": 4}.get(str(raw["precision"]), 2),
    )  # type: ignore[arg-type]


def look_up(raw: Any, key: str) -> Any:
    """The value of a dotted key as Hydra understood it; None for what is not there (the config's own checks name it)."""
    for part in key.split("."):
        raw = raw.get(part) if isinstance(raw, dict) else None
    return raw


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
