"""Plain nested dictionaries -> plain nested dataclasses, with every problem reported instead of the first one.

Supported field types: bool, int, float, str, Literal[...], list[T], Optional of those, and nested dataclasses. Nothing is
coerced but int -> float and a whole float -> int (``1e3`` steps). A field that is wrong is left at its default (or an empty value of its
type) and its key goes into ``Problems.bad``, so that later cross-field checks can leave it alone.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from typing import Any, Literal, Union

MISSING = "???"  # OmegaConf's mark of a mandatory value


class ConfigError(ValueError):
    """A configuration that cannot run. ``problems``: one line each, naming the key, its value and what is allowed."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        head = "1 problem in the configuration:" if len(problems) == 1 else f"{len(problems)} problems in the configuration:"
        super().__init__("\n".join([head, *(f"  - {p}" for p in problems)]))


@dataclasses.dataclass
class Problems:
    """What is wrong so far: one message each, and the dotted keys that hold no usable value."""

    messages: list[str] = dataclasses.field(default_factory=list)
    bad: set[str] = dataclasses.field(default_factory=set)

    def add(self, message: str, *keys: str) -> None:
        """Note a problem; ``keys`` hold no usable value from now on."""
        self.messages.append(message)
        self.bad.update(keys)

    def fine(self, *keys: str) -> bool:
        """Whether none of these keys (nor a key below them) is known to be bad."""
        return not any(b == k or b.startswith(k + ".") for k in keys for b in self.bad)


def all_keys(cls: type, prefix: str = "") -> list[str]:
    """Every dotted key of a nested dataclass, sections included."""
    keys = []
    for name, kind in field_types(cls).items():
        keys.append(prefix + name)
        if dataclasses.is_dataclass(kind):
            keys += all_keys(typing.cast(type, kind), f"{prefix}{name}.")
    return keys


def field_types(cls: type) -> dict[str, Any]:
    """Resolved type of each init field of a dataclass."""
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls) if f.init}


def nearest(key: str, keys: list[str]) -> str | None:
    """The known key that the user most likely meant, or None."""
    close = difflib.get_close_matches(key, keys, n=1, cutoff=0.6)
    if close:
        return close[0]
    tail = key.rsplit(".", 1)[-1]  # right name in the wrong section: steps -> train.steps
    same = [k for k in keys if k.rsplit(".", 1)[-1] == tail]
    if same:
        return same[0]
    tails = difflib.get_close_matches(tail, [k.rsplit(".", 1)[-1] for k in keys], n=1, cutoff=0.75)
    return next((k for k in keys if tails and k.rsplit(".", 1)[-1] == tails[0]), None)


def suggest(value: Any, allowed: typing.Iterable[Any]) -> str:
    """`` (did you mean zigzag?)`` for a misspelt choice, or an empty text."""
    words = [str(a) for a in allowed]
    lower = {w.lower(): w for w in words}
    text = str(value).lower()
    close = lower.get(text) or next(iter(difflib.get_close_matches(text, words, n=1, cutoff=0.6)), None)
    return f" (did you mean {close}?)" if close else ""


def build(cls: type, raw: Any, problems: Problems, prefix: str = "", known: list[str] | None = None) -> Any:
    """An instance of dataclass ``cls`` from the dictionary ``raw``; what is wrong is added to ``problems``."""
    known = all_keys(cls) if known is None else known
    section = prefix.rstrip(".")
    if not isinstance(raw, dict):
        problems.add(f"{section}={_show(raw)}: is a section, set its keys ({_sample(cls, prefix)}) instead", section)
        raw = {}
    kinds = field_types(cls)
    for key, value in raw.items():
        if key not in kinds:
            for leaf in _leaves(f"{prefix}{key}", value):
                close = nearest(leaf, known)
                problems.add(f"{leaf}: unknown key" + (f", did you mean {close}?" if close else ""))
    values = {}
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        key, kind = f"{prefix}{field.name}", kinds[field.name]
        if dataclasses.is_dataclass(kind):
            values[field.name] = build(typing.cast(type, kind), raw.get(field.name, {}), problems, f"{key}.", known)
            continue
        value = raw.get(field.name, dataclasses.MISSING)
        if value is dataclasses.MISSING:
            value = _default(field)
        elif not (isinstance(value, str) and value == MISSING):
            converted, wrong = convert(value, kind)
            if wrong is None:
                values[field.name] = converted
                continue
            problems.add(f"{key}={_show(value)}: {wrong}", key)
            value = _default(field)
        if value is dataclasses.MISSING or (isinstance(value, str) and value == MISSING):
            if problems.fine(key):
                problems.add(f"{key}: is missing, give {key}=<{describe(kind)}>", key)
            value = _empty(kind)
        values[field.name] = value
    return cls(**values)


def convert(value: Any, kind: Any) -> tuple[Any, str | None]:
    """``value`` as ``kind`` and None, or (None, what was expected)."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    expected = f"expected {describe(kind)}"
    if origin in (Union, types.UnionType):
        if value is None:
            return (None, None) if type(None) in args else (None, expected)
        for arg in args:
            if arg is not type(None):
                converted, wrong = convert(value, arg)
                if wrong is None:
                    return converted, None
        return None, expected
    if origin is Literal:
        # YAML reads off and on as true and false where a word is meant; null is no word
        text = {True: "on", False: "off"}[value] if isinstance(value, bool) else value
        meant = suggest("none" if value is None else value, args)
        return (text, None) if text in args else (None, f"expected one of {', '.join(str(a) for a in args)}{meant}")
    if origin in (list, tuple):
        if not isinstance(value, list | tuple):
            return None, expected
        out = []
        for item in value:
            converted, wrong = convert(item, args[0])
            if wrong is not None:
                return None, f"{wrong} in each place"
            out.append(converted)
        return (out if origin is list else tuple(out)), None
    if kind is bool:
        return (value, None) if isinstance(value, bool) else (None, expected)
    if kind is int:
        if isinstance(value, float) and value.is_integer():
            return int(value), None
        return (value, None) if isinstance(value, int) and not isinstance(value, bool) else (None, expected)
    if kind is float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return (float(value), None) if number else (None, expected)
    if kind is str:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return str(value), None  # name=17 is a name
        return (value, None) if isinstance(value, str) else (None, expected)
    return value, None


def describe(kind: Any) -> str:
    """A type in the user's words."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        names = [describe(a) for a in args if a is not type(None)]
        return " or ".join(names) + (" or null" if type(None) in args else "")
    if origin is Literal:
        return "one of " + ", ".join(str(a) for a in args)
    if origin in (list, tuple):
        return f"a list of {describe(args[0]).removeprefix('a ').removeprefix('an ')}s"
    return {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}.get(kind, str(kind))


def _leaves(key: str, value: Any) -> list[str]:
    return [leaf for k, v in value.items() for leaf in _leaves(f"{key}.{k}", v)] if isinstance(value, dict) and value else [key]


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return dataclasses.MISSING


def _empty(kind: Any) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return args[0]
    if origin in (Union, types.UnionType):
        return None if type(None) in args else _empty(args[0])
    return origin() if origin in (list, tuple) else kind()


def _show(value: Any) -> str:
    return "null" if value is None else repr(value) if isinstance(value, str) else str(value)


def _sample(cls: type, prefix: str) -> str:
    names = list(field_types(cls))
    return ", ".join(f"{prefix}{n}" for n in names[:3]) + (", ..." if len(names) > 3 else "")
