"""Launching a compiled Triton kernel again with nothing worked out anew.

A call of a kernel computes its arguments from shapes, strides and scalars; when all of these are what they were, only addresses
differ. ``Replays`` keeps the arguments of earlier launches under exactly that key and fills in the addresses: a few microseconds,
where Triton's documented ``compiled[grid](*args)`` costs 15 to 30 and working out the arguments as much again.

For that it calls the C function behind Triton's launcher itself. That is not public, so it is looked at closely when a launch is
recorded: with any other Triton, a launch hook (profilers) or scratch memory, nothing is recorded and callers go the documented way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from torch import Tensor

_MAX_RECORDS = 2048  # every sequence length has its own
_MAX_MAPS = 256  # addresses for which a record keeps TMA descriptors


@dataclass(frozen=True)
class Launched:
    """One launch: the compiled kernel, its grid of three dims and all of its arguments in order, constants included."""

    compiled: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]


@dataclass
class _Record:
    """A launch without its addresses."""

    launch: Callable[..., None]  # Triton's C function
    head: tuple[Any, ...]  # its first arguments: the grid
    middle: tuple[Any, ...]  # those after the stream
    args: list[Any]
    pointers: list[tuple[int, int]]  # (place in args, number of the tensor)
    maps: list[tuple[int, int, Callable[[int], Any], dict[int, Any]]]  # (place, number, maker of a TMA descriptor, those made)
    stream_of: Callable[[int], int]
    hooks: tuple[list[Any], list[Any]]  # to be called before and after each launch, by whoever profiles


class Replays:
    """Recorded launches. One per kernel object; holds no tensor and no device memory."""

    def __init__(self) -> None:
        self._records: dict[Any, _Record] = {}

    def key(self, fixed: tuple[Any, ...], device: int, tensors: Sequence[Tensor | None]) -> tuple[Any, list[int]]:
        """The key of a launch and the tensors' addresses.

        ``fixed``: all that the arguments and the grid depend on besides the tensors' shapes, strides, types, alignment to 16 bytes and
        which of them are the same. ``tensors``: every tensor that the kernel may be given, in a fixed order. ``device``: the number of
        the current device, on which all of them are.
        """
        addresses: list[int] = []
        first: dict[int, int] = {}
        parts: list[Any] = [fixed, device]
        for i, x in enumerate(tensors):
            if x is None:
                addresses.append(0)
                parts.append(None)
                continue
            at = x.data_ptr()
            addresses.append(at)
            parts += (x.shape, x.stride(), x.dtype, at % 16, first.setdefault(at, i))
        return tuple(parts), addresses

    def run(self, key: Any, addresses: list[int]) -> bool:
        """Launch what was recorded under this key, on the current stream; False if nothing was."""
        record = self._records.get(key)
        if record is None or record.hooks[0] or record.hooks[1]:
            return False
        args = record.args.copy()
        for place, i in record.pointers:
            args[place] = addresses[i]
        for place, i, make, made in record.maps:
            at = addresses[i]
            found = made.get(at)
            if found is None:
                if len(made) >= _MAX_MAPS:
                    made.clear()
                found = made[at] = make(at)
            args[place] = found
        record.launch(*record.head, record.stream_of(key[1]), *record.middle, *args)
        return True

    def add(self, key: Any, addresses: list[int], launched: Launched | None) -> None:
        """Record a launch that has just been made, if it can be."""
        if launched is None:
            return
        record = _take_apart(launched, addresses)
        if record is not None:
            if len(self._records) >= _MAX_RECORDS:
                self._records.clear()
            self._records[key] = record


def _take_apart(launched: Launched, addresses: list[int]) -> _Record | None:
    """The record of a launch; None if this Triton does not look as expected or a tensor is not among the addressed ones."""
    try:
        from triton import knobs
        from triton.backends.nvidia import driver as nvidia
        from triton.runtime import driver

        run, compiled = launched.compiled.run, launched.compiled
        if nvidia._BASE_ARGS_FORMAT != "iiiKKppOOOOOO" or run.global_scratch_size or run.profile_scratch_size:
            return None
        launch: Any = run.launch
        metas: Iterator[Any] = iter(())
        if getattr(launch, "__closure__", None):  # a Python function that makes descriptors before it calls the C function
            inside = dict(zip(launch.__code__.co_freevars, (cell.cell_contents for cell in launch.__closure__), strict=True))
            launch, metas = inside["launcher"], iter(inside["tensordesc_meta"])
        middle = (compiled.function, run.launch_cooperative_grid, run.launch_pdl, None, None, compiled.packed_metadata, None, None, None)
        hooks = (knobs.runtime.launch_enter_hook.calls, knobs.runtime.launch_exit_hook.calls)
        record = _Record(launch, launched.grid, middle, [], [], [], driver.active.get_current_stream, hooks)
        kinds = list(compiled.src.signature.values())
    except (ImportError, AttributeError, KeyError):
        return None
    if len(kinds) != len(launched.args):
        return None
    for arg, kind in zip(launched.args, kinds, strict=True):
        if isinstance(kind, str) and kind.startswith("tensordesc"):
            meta, at = next(metas), arg.base.data_ptr()
            if meta is None or at not in addresses:
                return None
            like = SimpleNamespace(shape=list(arg.shape), strides=list(arg.strides), padding=arg.padding)
            record.maps.append((len(record.args), addresses.index(at), _maker(nvidia.make_tensordesc_arg, like, meta), {}))
            record.args += [None, *like.shape, *like.strides]
        elif isinstance(arg, Tensor):
            if arg.data_ptr() not in addresses:
                return None
            record.pointers.append((len(record.args), addresses.index(arg.data_ptr())))
            record.args.append(0)
        else:
            record.args.append(arg)
    return record


def _maker(make_arg: Callable[[Any, Any], list[Any]], like: SimpleNamespace, meta: Any) -> Callable[[int], Any]:
    def make(at: int) -> Any:
        base = SimpleNamespace(data_ptr=lambda: at)
        return make_arg(SimpleNamespace(base=base, shape=like.shape, strides=like.strides, padding=like.padding), meta)[0]

    return make
