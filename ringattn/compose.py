"""The config that a command line describes, without starting a run: for scripts that take training's keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ringattn.overrides import prepare
from ringattn.typed import ConfigError, Problems


def compose_keys(arguments: list[str], configs: Path, problems: Problems | None = None) -> dict[str, Any]:
    """The composed config as a dictionary: ``arguments`` are ``key=value``, ``configs`` the folder of config.yaml.

    Problems of the command line go into ``problems`` (for ``from_dict`` to report with its own), or are raised as ConfigError.
    """
    found = problems or Problems()
    ready = prepare(arguments, configs, found)
    if problems is None and found.messages:
        raise ConfigError(found.messages)
    try:
        with initialize_config_dir(str(configs), version_base="1.3"):
            raw: Any = OmegaConf.to_container(compose("config", overrides=ready), resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError([*found.messages, str(error).splitlines()[0]]) from None
    return dict(raw)
