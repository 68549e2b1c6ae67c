"""The planner: what fits on which GPUs, how fast it will be, and the overrides that start it.

    plan({"model": {...}, ...}, machine="h200", gpus=8, wish="longest")     the longest context
    plan({..., "train": {"seq_len": 131072}}, machine="h200", gpus=8)       that length, at best speed

Every candidate is a training config: it is built by ``ringattn.config.from_dict``, which refuses what this version cannot run, and
judged by ``ringattn.cost``. Only keys that the caller left open are chosen; those in ``fixed`` stay as they are.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from ringattn import cost
from ringattn.config import Config, ConfigError, from_dict
from ringattn.cost import GIB, Machine, Memory, StepTime, Work

Wish = Literal["fastest", "longest"]
# From the fastest to the smallest. Activations are offloaded where asked for only, states where nothing else fits: a profile does not
# say what the host has left.
POLICIES = ("none", "attention_saved", "block")
GRANULE = 1024  # lengths are multiples of this times twice the ring


class NothingFits(ValueError):
    """No candidate fits. ``nearest``: the one that lacks least, with what is short; ``fitting``: the nearest plan that does fit, if any."""

    def __init__(self, message: str, nearest: Plan, fitting: Plan | None) -> None:
        super().__init__(message)
        self.nearest, self.fitting = nearest, fitting


@dataclass(frozen=True)
class Plan:
    """One way to run a step. ``overrides``: what to add to the command line, in order; ``requested``: what the caller fixed."""

    work: Work
    machine: Machine
    memory: Memory
    time: StepTime
    overrides: dict[str, Any]
    requested: dict[str, Any]

    @property
    def lacks(self) -> tuple[float, float]:
        """Bytes by which the peak is above what the GPU has to offer, and what waits on the host above what that has; 0 where it fits."""
        on_host = cost.host_bytes(self.work) - self.machine.host_gib * GIB
        return max(0.0, self.memory.peak - self.machine.usable_bytes), max(0.0, on_host)

    @property
    def fits(self) -> bool:
        """Whether GPU and host have the memory."""
        return not any(self.lacks)

    @property
    def tokens_per_s(self) -> float:
        """Tokens of the whole run in a second."""
        return self.work.rows * self.work.seq_len / self.time.total_s

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation, visible pairs counted, of the data-sheet peak."""
        w = self.work
        flops = cost.step_flops(w.model, tokens=w.rows * w.seq_len, pairs=w.step_pairs).total
        return flops / (self.time.total_s * w.gpus * self.machine.peak_flops)

    @property
    def command(self) -> str:
        """The command that starts it on one node, or on as many as it takes."""
        nodes = -(-self.work.gpus // self.machine.node_gpus)
        if self.work.gpus == 1:
            start = "python"
        elif nodes == 1:
            start = f"torchrun --standalone --nproc-per-node {self.work.gpus}"
        else:
            start = f"torchrun --nnodes {nodes} --nproc-per-node {self.machine.node_gpus} --rdzv-backend c10d --rdzv-endpoint HOST:29500"
        return f"{start} -m ringattn.train {self.arguments}"

    @property
    def arguments(self) -> str:
        """Overrides as they are typed."""
        return " ".join(f"{key}={show(value)}" for key, value in {**self.requested, **self.overrides}.items())


@dataclass(frozen=True)
class Request:
    """What a plan is asked for; the fields are the arguments of :func:`plan`."""

    raw: dict[str, Any]
    machine: Machine
    gpus: int
    fixed: dict[str, Any]
    vocab_size: int
    documents: int
    precision_bytes: int

    def at_length(self, seq_len: int) -> Request:
        """The same with rows of ``seq_len`` tokens."""
        return replace(self, raw=merged(self.raw, {"train.seq_len": seq_len}))


def show(value: Any) -> str:
    """A value as Hydra reads it."""
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(show, value)) + "]"
    return {True: "true", False: "false", None: "null"}.get(value, str(value)) if value is None or isinstance(value, bool) else str(value)


def plan(
    raw: dict[str, Any], *, machine: str | Machine = "h200", gpus: int = 1, wish: Wish = "fastest", fixed: dict[str, Any] | None = None,
    vocab_size: int = 0, documents: int = 0, precision_bytes: int = 2,
) -> Plan:
    """The best plan for a training config.

    Args:
        raw: nested keys of a training config (``model`` must be complete, as in configs/model/); what it leaves out has its default.
        machine: a built-in profile (a100, h100, h200, b200), a file of scripts/profile_machine.py, or a Machine.
        gpus: ranks of the run. wish: ``fastest`` at ``train.seq_len``, or ``longest`` (at the best speed that this length allows).
        fixed: dotted keys that must stay as they are (they are set in ``raw`` too), for instance {"activation": "block"}.
        vocab_size: where the model's own is 0. documents: mean length that attention stays within, 0 = whole rows.

    Raises NothingFits (a ValueError) where no candidate fits, ConfigError for a config that no choice could mend, ValueError for an
    unknown machine.
    """
    profile = cost.find_machine(machine) if isinstance(machine, str) else machine
    if gpus < 1:
        raise ValueError(f"gpus={gpus}: must be at least 1")
    if wish not in ("fastest", "longest"):
        raise ValueError(f"wish={wish}: must be fastest or longest")
    request = Request(raw, profile, gpus, dict(fixed or {}), vocab_size, documents, precision_bytes)
    if wish == "fastest":
        return choose(request)
    best: Plan | None = None
    step = GRANULE * 2
    low, high = 0, step
    while high < 2**33 and (found := attempt(request, high)) is not None:
        best, low, high = found, high, high * 2
    while best is not None and high - low > max(step, low // 64):
        middle = (low + high) // 2 // step * step
        found = attempt(request, middle)
        best, low, high = (found, middle, high) if found is not None else (best, low, middle)
    return choose(request.at_length(step)) if best is None else best


def attempt(request: Request, seq_len: int) -> Plan | None:
    """The fastest plan at a length (rounded up to one that the layout can cut), None where nothing fits."""
    unit = 2 * request.gpus * 64
    longer = -(-seq_len // unit) * unit
    found = fitting_plans(request.at_length(longer))
    if not found:
        return None
    best = max(found, key=lambda p: p.tokens_per_s)
    return replace(best, overrides={"train.seq_len": longer, **best.overrides})


def choose(request: Request) -> Plan:
    """The fastest a token of those that fit. Raises NothingFits with the nearest that does."""
    fitting = fitting_plans(request)
    if fitting:
        return max(fitting, key=lambda p: p.tokens_per_s)
    nearest = min([*candidates(request), *with_host_states(request)], key=lambda p: sum(p.lacks))
    raise NothingFits(shortage(nearest), nearest, nearest_fitting(nearest, request))


def fitting_plans(request: Request) -> list[Plan]:
    """The plans that fit, with optimizer states on the host only where none does without."""
    return [p for p in candidates(request) if p.fits] or [p for p in with_host_states(request) if p.fits]


def with_host_states(request: Request) -> list[Plan]:
    """Every plan with the optimizer's states on the host, none where that is refused or the caller has said whether to."""
    change = {"optim.offload": True}
    if "optim.offload" in request.fixed:
        return []
    try:
        return [replace(p, overrides=p.overrides | change) for p in candidates(replace(request, raw=merged(request.raw, change)))]
    except ConfigError:
        return []


def shortage(p: Plan) -> str:
    """What is short, in a sentence."""
    missing, on_host = (x / GIB for x in p.lacks)
    if not missing:
        return (
            f"nothing fits: at train.seq_len={p.work.seq_len} on {p.work.gpus} x {p.machine.name} the nearest plan keeps "
            f"{cost.host_bytes(p.work) / GIB:.1f} GiB a GPU on the host and {p.machine.host_gib:.1f} may be taken, {on_host:.1f} GiB short"
        )
    first, second = p.memory.largest[:2]
    return (
        f"nothing fits: at train.seq_len={p.work.seq_len} on {p.work.gpus} x {p.machine.name} the smallest plan needs "
        f"{p.memory.peak / GIB:.1f} GiB a GPU and {p.machine.usable_bytes / GIB:.1f} are usable, {missing:.1f} GiB short; largest: "
        f"{first} {p.memory.parts[first] / GIB:.1f} GiB, {second} {p.memory.parts[second] / GIB:.1f} GiB (at the moment '{p.memory.phase}')"
    )


def nearest_fitting(p: Plan, request: Request) -> Plan | None:
    """The nearest plan that fits: the same length on the fewest GPUs more, otherwise a shorter length on as many."""
    more = request.gpus
    while more < 64 * request.gpus:
        more *= 2
        found = fitting_plans(replace(request, gpus=more))
        if found:
            return min(found, key=lambda q: q.time.total_s)
    length = p.work.seq_len
    while length > 2 * GRANULE:
        length //= 2
        shorter = attempt(request, length)
        if shorter is not None:
            return shorter
    return None


def divisors(n: int) -> list[int]:
    """Ascending."""
    return [d for d in range(1, n + 1) if n % d == 0]


def candidates(request: Request) -> Iterator[Plan]:
    """Every plan that the config's own checks accept. Raises ConfigError if there is none, with the problems of the last."""
    problems: ConfigError | None = None
    found = False
    for choice in choices(request.raw, request.gpus, request.fixed):
        for inner in levels(request, choice):
            try:
                config = from_dict(merged(request.raw, choice | inner), world_size=request.gpus)
            except ConfigError as error:
                problems = error
                continue
            found = True
            yield evaluate(request, config, choice | inner)
    if not found and problems is not None:
        raise problems


def choices(raw: dict[str, Any], gpus: int, fixed: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Values for the keys that were left open. One GPU knows one mesh; others are factorised ring x ulysses x shard x replicate."""

    def open_values(key: str, values: list[Any]) -> list[Any]:
        return [fixed[key]] if key in fixed else values

    model = raw.get("model", {})
    chunks = open_values("model.ffn_chunk", sorted({int(model.get("ffn_chunk", 0)), 8192}))
    for ring in open_values("parallel.ring", divisors(gpus)):
        for ulysses in open_values("parallel.ulysses", [u for u in divisors(gpus) if gpus % (ring * u) == 0 and u <= 8]):
            rest = gpus // (ring * ulysses) if gpus % (ring * ulysses) == 0 else 0
            for shard in open_values("parallel.shard", divisors(rest) if rest else []):
                if not rest or rest % shard:
                    continue
                for policy in open_values("activation", list(POLICIES)):
                    for chunk in chunks:
                        choice = {
                            "parallel.ring": ring, "parallel.ulysses": ulysses, "parallel.shard": shard,
                            "parallel.replicate": rest // shard, "parallel.layout": fixed.get("parallel.layout", "zigzag"),
                            "activation": policy, "model.ffn_chunk": chunk,
                        }
                        if "train.rows" not in fixed:
                            choice["train.rows"] = max(1, shard * (rest // shard)) * int(raw.get("train", {}).get("micro_rows", 1))
                        yield choice


def levels(request: Request, choice: dict[str, Any]) -> list[dict[str, Any]]:
    """Whether to make it a ring of two levels: where it spans whole nodes, both; otherwise as the caller has it."""
    node, ulysses = request.machine.node_gpus, choice["parallel.ulysses"]
    spans = choice["parallel.ring"] * ulysses > node and node % ulysses == 0 and choice["parallel.ring"] % (node // ulysses) == 0
    if "parallel.inner" in request.fixed or not spans:
        return [{}]
    return [{}, {"parallel.inner": node // ulysses * int(request.raw.get("parallel", {}).get("virtual", 1))}]


def merged(raw: dict[str, Any], choice: dict[str, Any]) -> dict[str, Any]:
    """``raw`` with dotted keys set."""
    changed = copy.deepcopy(raw)
    for key, value in choice.items():
        *sections, name = key.split(".")
        holder = changed
        for section in sections:
            holder = holder.setdefault(section, {})
        holder[name] = value
    return changed


def evaluate(request: Request, config: Config, choice: dict[str, Any]) -> Plan:
    """Memory and time of one config. Overrides that say what is the default anyway are left out."""
    vocab = config.model.vocab_size or request.vocab_size or 258
    work = cost.work_of(
        config, replace(config.model, vocab_size=vocab), request.gpus, compute_bytes=request.precision_bytes, documents=request.documents
    )
    plain = {"parallel.ulysses": 1, "parallel.shard": 1, "parallel.replicate": 1, "parallel.layout": "zigzag", "activation": "none"}
    overrides = {
        k: v for k, v in choice.items()
        if k not in request.fixed and plain.get(k) != v and not (k == "parallel.ring" and request.gpus == 1)
    }  # fmt: skip
    return Plan(work, request.machine, cost.memory(work), cost.step_time(work, request.machine), overrides, dict(request.fixed))
