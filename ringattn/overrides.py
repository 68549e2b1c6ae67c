"""The command line before Hydra sees it, so that all mistakes can be listed together.

Hydra stops at the first key that its configs do not hold. Here every ``key=value`` that chooses no config group becomes ``++key=value``
(set it, whether known or not), which leaves the judgement to :func:`ringattn.config.from_dict`. What Hydra could not even parse, and
options that a group does not have, are reported and taken off the line.
"""

from __future__ import annotations

from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from ringattn.typed import Problems, nearest

HYDRA = "hydra"
QUOTES = ("'", '"', "[", "{", "$")
# Hydra's own options that are followed by a value.
WITH_VALUE = (
    "--config-dir", "-cd", "--config-path", "-cp", "--config-name", "-cn", "--cfg", "-c", "--package", "-p", "--info", "-i",
    "--experimental-rerun",
)


def prepare(arguments: list[str], configs: Path, problems: Problems) -> list[str]:
    """The arguments that Hydra gets. ``configs``: the folder whose sub-folders are the config groups; problems go into ``problems``."""
    groups = {p.name: sorted(f.stem for f in p.glob("*.yaml")) for p in configs.iterdir() if p.is_dir()}
    sweep = any(a in ("-m", "--multirun") for a in arguments)
    own_folders = any(a.startswith(("--config-dir", "-cd", "--config-path", "-cp")) for a in arguments)
    options: list[str] = []
    ready: list[str] = []
    for before, argument in zip(["", *arguments], arguments, strict=False):
        if before in WITH_VALUE or argument.startswith("-"):
            options.append(argument)
            continue
        if argument.startswith("~"):
            if argument[1:].startswith(HYDRA):
                ready.append(argument)
            else:
                problems.add(f"{argument}: a key cannot be removed; leave it out for its default, or give it a value")
            continue
        if "=" not in argument:
            problems.add(f"{argument}: is not of the form key=value")
            continue
        key, value = argument.split("=", 1)
        bare = key.lstrip("+~")
        if bare in groups and "," in value and not sweep:
            problems.add(f"{argument}: chooses {value.count(',') + 1} options at once; add -m to run them one after another")
            continue
        if bare in groups:
            # (with config folders of the user's own, options that are not here may be there)
            unknown = [] if own_folders else [v for v in value.split(",") if v not in groups[bare]]
            if not unknown or (bare, value) == ("experiment", "null"):
                # nan is a number to Hydra, and an option here
                options_named = ",".join(f"'{v}'" if v.lower() in ("nan", "inf") else v for v in value.split(","))
                ready.append(f"{key}={options_named}")
            else:
                close = nearest(unknown[0], groups[bare])
                problems.add(
                    f"{bare}={unknown[0]}: is no option of this group, choose from {', '.join(groups[bare])}"
                    + (f" (did you mean {close}?)" if close else "")
                )
            continue
        if "=" in value and not value.startswith(QUOTES) and not (sweep and "," in value):
            value = "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"  # Hydra wants a value with '=' quoted; users need not
        if key == bare and not bare.startswith(HYDRA) and "@" not in bare:
            key = "++" + bare
        try:
            swept = OverridesParser.create().parse_override(f"{key}={value}").is_sweep_override()
        except HydraException as error:
            problems.add(f"{argument}: cannot be parsed ({str(error).splitlines()[0]}); put quotes round the value: \"{bare}='...'\"")
            continue
        if swept and not sweep:
            problems.add(f"{argument}: is several values; add -m to run them one after another, or write a list as {bare}=[...]", bare)
            continue
        ready.append(f"{key}={value}")
    return options + ready  # Hydra's parser takes no option between two overrides
