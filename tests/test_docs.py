"""README and docs/ say what is: their commands compose, their examples run, their links lead somewhere, what is generated is up to date."""

from __future__ import annotations

import doctest
import importlib.util
import math
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType

import pytest

from ringattn.compose import compose_keys
from ringattn.config import Config, ConfigError, from_dict
from ringattn.train import config_folder
from ringattn.typed import all_keys

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
GROUPS = {p.name: {o.stem for o in p.glob("*.yaml")} for p in config_folder().iterdir() if p.is_dir()}
KEYS = set(all_keys(Config))


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def commands() -> list[tuple[str, list[str]]]:
    """(page, words) of each command line in a bash block that takes config keys."""
    found = []
    for page in PAGES:
        for block in blocks(page, "bash"):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if "ringattn.train" in words or any(w.endswith("show_schedule.py") for w in words):
                    found.append((name_of(page), words))
    return found


def processes(words: list[str]) -> int:
    return math.prod(int(words[i + 1]) for i, w in enumerate(words) if w in ("--nnodes", "--nproc-per-node"))


@pytest.mark.parametrize(("page", "words"), commands(), ids=lambda x: x if isinstance(x, str) else " ".join(x)[-60:])
def test_commands_compose(page: str, words: list[str]) -> None:
    keys = [w for w in words[1:] if re.match(r"[a-z_.+]+=", w)]
    broken_on_purpose = any("stpes" in k for k in keys)
    sweep = "-m" in words[words.index("ringattn.train") :] if "ringattn.train" in words else False
    if sweep:
        keys = [k.split(",")[0] for k in keys]
    if "ringattn.train" not in words:
        keys = [k for k in keys if not k.startswith("parallel.ring=")]
    keys = [k.replace("replicate=N", "replicate=2") for k in keys]
    if "device=cuda" in keys:
        keys.remove("device=cuda")
    try:
        from_dict(compose_keys(keys, config_folder()), world_size=processes(words))
    except ConfigError as error:
        assert broken_on_purpose, f"{page}: {error}"
        said = "\n".join("\n".join(blocks(p, "text")) for p in PAGES)
        assert str(error) in said, f"{page}: shows another message than {error}"
    else:
        assert not broken_on_purpose


def test_there_are_commands() -> None:
    assert {page for page, _ in commands()} >= {"README.md", "docs/getting-started.md", "docs/multi-node.md", "docs/debugging.md"}


@pytest.mark.parametrize("page", [p for p in PAGES if p.name != "log.md"], ids=name_of)
def test_keys_named_in_the_text_exist(page: Path) -> None:
    wrong = []
    for word in re.findall(r"`([a-z_]+(?:\.[a-z_]+)*=?[^` (]*)`", page.read_text()):
        key, given, value = word.partition("=")
        if given and key in GROUPS:
            if value and value not in GROUPS[key] and value not in ("NAME",) and not value.startswith("<"):
                wrong.append(word)
        elif key.split(".")[0] in {k for k in KEYS if any(o.startswith(k + ".") for o in KEYS)} and "." in key:
            if key not in KEYS and not key.endswith((".py", ".yaml", ".md")):
                wrong.append(word)
        elif given and key not in KEYS and key not in ("group", "key"):
            wrong.append(word)
    assert not wrong, f"{name_of(page)}: no such key or option: {wrong}"


def test_the_tour_of_the_config_names_every_option() -> None:
    rows = re.findall(r"^\| (`.*?) \| (.*?) \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(rows) > 8
    for names, choices in rows:
        first = re.findall(r"`([^`]+)`", names)
        options = [re.findall(r"`([^`]+)`", part) for part in choices.split(";")]
        for name, shown in zip(first, options, strict=False):
            group = name.rstrip("=")
            if name.endswith("="):
                assert set(shown) <= GROUPS[group], f"README: {name} has no {set(shown) - GROUPS[group]}"
                missing = GROUPS[group] - set(shown) - {"none", "default"}
                assert not missing or group in ("parallel", "log"), f"README: {name} does not name {missing}"
            else:
                prefix = first[0].rsplit(".", 1)[0]
                assert (prefix + group if group.startswith(".") else group) in KEYS, f"README: no key {name}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_and_files_exist(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{name_of(page)}: {target}"
    folders = "scripts|ringattn|tests|configs|examples|launch|docs"
    for target in re.findall(rf"(?<![\w/.])((?:{folders})/[\w./-]*\w\.(?:py|sh|yaml|md|png|sbatch))", text):
        assert (ROOT / target).exists(), f"{name_of(page)}: {target}"


def test_readme_example_runs() -> None:
    for block in blocks(ROOT / "README.md", "python"):
        exec(compile(block, "README.md", "exec"), {})  # noqa: S102 - our own page


def test_examples_of_the_interface_run() -> None:
    failed, tried = doctest.testfile(str(ROOT / "docs/api.md"), module_relative=False)
    assert tried > 20 and failed == 0


def make_docs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_docs", ROOT / "scripts/make_docs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_docs"] = module
    spec.loader.exec_module(module)
    return module


def test_generated_pages_are_up_to_date() -> None:
    stale = [str(path) for path, text in make_docs().everything().items() if (ROOT / path).read_text() != text]
    assert not stale, f"stale: {stale}; python scripts/make_docs.py writes them again"


def test_every_key_is_described() -> None:
    page = (ROOT / "docs/configuration.md").read_text()
    rows = dict(re.findall(r"^\| `([a-z_.0-9]+)` \|.*\| (.*?) \|$", page, re.MULTILINE))
    sections = {k for k in KEYS if any(o.startswith(k + ".") for o in KEYS)}
    assert set(rows) == KEYS - sections
    assert not [k for k, what in rows.items() if len(what) < 1]


def test_every_option_of_every_group_says_what_it_is() -> None:
    page = (ROOT / "docs/configuration.md").read_text()
    for group, options in GROUPS.items():
        for option in options:
            assert re.search(rf"^\| `{group}={re.escape(option)}` \| \S.* \|$", page, re.MULTILINE), f"{group}={option}"
