"""Writes the page about a run again: curves, ring, config and its changes, versions, the command. Also while the run is going on.

    python scripts/report.py runs/NAME ...
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ringattn.training.report import write_report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="runs/NAME", help="folder of a run")
    code = 0
    for folder in parser.parse_args().runs:
        try:
            path = write_report(folder)
        except (OSError, ValueError, KeyError) as error:
            print(f"{folder}: {error}", file=sys.stderr)
            code = 2
            continue
        if path is None:
            print(f"{folder}: has no metrics.jsonl with a finished step", file=sys.stderr)
            code = 2
        else:
            print(f"wrote {path}")
    return code


if __name__ == "__main__":
    sys.exit(main())
