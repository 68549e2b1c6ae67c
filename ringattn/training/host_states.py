"""``optim.offload``: AdamW whose two moments wait in pinned host memory and pass through the GPU for the update.

The moments of all parameters of a rank lie in two flat host buffers, one after the other; each parameter's state is a view of them, so
checkpoints, and a resume with or without ``optim.offload``, see the same tensors. An update goes through the buffers in buckets of
:data:`BUCKET` numbers: while one is updated, the next comes in and the one before goes out, each on its own stream, so what the update
takes beside the gradients is :data:`SLOTS` buckets. The arithmetic is that of the optimizer without offloading, on the same device, on
slices of the same tensors: the same bits. On a CPU the same happens without streams.

Not torchao's CPUOffloadOptimizer: that updates on the CPU, keeps the master weights there too, and its bits are not AdamW's on the GPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from ringattn.config import ConfigError
from ringattn.cost import GIB
from ringattn.cost import STATE_BUCKET as BUCKET
from ringattn.cost import STATE_SLOTS as SLOTS
from ringattn.training.half_states import update_half
from ringattn.training.shards import like, local

MOMENTS = ("exp_avg", "exp_avg_sq")


class Piece(NamedTuple):
    """Numbers ``start`` to ``stop`` of a parameter (flattened, this rank's shard), at ``at`` of their bucket."""

    group: int
    parameter: Tensor
    start: int
    stop: int
    at: int


class HostStateAdamW(torch.optim.Optimizer):
    """AdamW (arXiv 1711.05101) over contiguous parameters of one device and dtype, which may be sharded (DTensor).

    ``narrow``: bf16 moments as in :class:`ringattn.training.half_states.HalfStateAdamW`, otherwise the parameters' dtype. ``bucket``:
    numbers of a moment that are on the device at once, three times (default :data:`BUCKET`).
    """

    def __init__(
        self, params: Any, lr: float, betas: tuple[float, float], eps: float, weight_decay: float = 0.0, *, narrow: bool = False,
        bucket: int = BUCKET,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.narrow = narrow
        every = [(i, p) for i, group in enumerate(self.param_groups) for p in group["params"]]
        sizes = [local(p).numel() for _, p in every]
        self.device = local(every[0][1]).device
        dtype = torch.bfloat16 if narrow else every[0][1].dtype
        self.host = [pinned(sum(sizes), dtype, self.device) for _ in MOMENTS]
        self.buckets: list[tuple[slice, list[Piece]]] = []
        place = 0
        for (_, p), size in zip(every, sizes, strict=True):
            state = {name: like(p, whole[place : place + size]) for name, whole in zip(MOMENTS, self.host, strict=True)}
            self.state[p] = {"step": torch.zeros((), dtype=torch.float32), **state}
            place += size
        for begin in range(0, place, bucket):
            span = slice(begin, min(place, begin + bucket))
            self.buckets.append((span, list(pieces(every, sizes, span))))
        streams = self.device.type == "cuda"
        self.inward, self.outward = (torch.cuda.Stream(self.device) if streams else None for _ in range(2))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One update. ``closure`` is called first, as by every optimizer of PyTorch's."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["step"] += p.grad is not None
        size = max((span.stop - span.start for span, _ in self.buckets), default=0)
        count = min(SLOTS, len(self.buckets))
        slots = [[torch.empty(size, dtype=x.dtype, device=self.device) for x in self.host] for _ in range(count)]
        if self.inward is None or self.outward is None:
            for span, part in self.buckets:
                self._copy(span, slots[0], inward=True)
                self._update(part, slots[0])
                self._copy(span, slots[0], inward=False)
            return loss
        compute = torch.cuda.current_stream(self.device)
        self.inward.wait_stream(compute)  # the slots are memory of the compute stream
        self.inward.wait_stream(self.outward)  # what the last update sent out has arrived
        arrived: list[torch.cuda.Event] = []
        left: list[torch.cuda.Event] = []

        def fetch(i: int) -> None:
            if i >= SLOTS:
                self.inward.wait_event(left[i - SLOTS])  # type: ignore[union-attr]
            with torch.cuda.stream(self.inward):
                self._copy(self.buckets[i][0], slots[i % SLOTS], inward=True)
            arrived.append(self.inward.record_event())  # type: ignore[union-attr]

        for i, (span, part) in enumerate(self.buckets):
            for ahead in range(len(arrived), min(i + 2, len(self.buckets))):
                fetch(ahead)
            compute.wait_event(arrived[i])
            self._update(part, slots[i % SLOTS])
            self.outward.wait_stream(compute)
            with torch.cuda.stream(self.outward):
                self._copy(span, slots[i % SLOTS], inward=False)
            left.append(self.outward.record_event())
        compute.wait_stream(self.outward)  # then the slots may be used for something else
        return loss

    def _copy(self, span: slice, slot: list[Tensor], *, inward: bool) -> None:
        for whole, here in zip(self.host, slot, strict=True):
            on_host, on_device = whole[span], here[: span.stop - span.start]
            (on_device if inward else on_host).copy_(on_host if inward else on_device, non_blocking=True)

    def _update(self, part: list[Piece], slot: list[Tensor]) -> None:
        for index, group in enumerate(self.param_groups):
            own = [x for x in part if x.group == index and x.parameter.grad is not None]
            if not own:
                continue
            values = [local(x.parameter).view(-1)[x.start : x.stop] for x in own]
            gradients = [local(g).view(-1)[x.start : x.stop] for x in own if (g := x.parameter.grad) is not None]
            firsts, seconds = ([here[x.at : x.at + x.stop - x.start] for x in own] for here in slot)
            steps = [int(self.state[x.parameter]["step"]) for x in own]
            if self.narrow:
                for x, value, gradient, first, second, step in zip(own, values, gradients, firsts, seconds, steps, strict=True):
                    update_half(value, gradient, first, second, step, group, start=x.start)
                continue
            fused = self.device.type == "cuda"
            # the function counts the step itself, in a tensor for each slice
            before = torch.tensor(steps, dtype=torch.float32) - 1
            counts = list((before.to(self.device, non_blocking=True) if fused else before).unbind())
            adamw(
                values, gradients, firsts, seconds, [], counts, fused=fused, foreach=not fused, amsgrad=False, beta1=group["betas"][0],
                beta2=group["betas"][1], lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
            )  # fmt: skip

    def synchronize(self) -> None:
        """Wait until the host buffers hold the last update."""
        if self.outward is not None:
            self.outward.synchronize()

    def state_dict(self) -> dict[str, Any]:
        """As every optimizer's; the moments are views of the host buffers, not copies."""
        self.synchronize()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy the values into the host buffers; PyTorch's own way would bring all of them to the device first."""
        self.synchronize()
        names = [name for group in state_dict["param_groups"] for name in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        with torch.no_grad():
            for name, p in zip(names, parameters, strict=True):
                saved = state_dict["state"].get(name, {})  # none for a parameter that never had a gradient
                for key, mine in ((k, local(x)) for k, x in self.state[p].items()):
                    if key not in saved:
                        mine.zero_()
                    elif mine.data_ptr() != local(saved[key]).data_ptr():
                        mine.copy_(local(saved[key]))
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group |= {key: value for key, value in saved.items() if key != "params"}


def pieces(every: list[tuple[int, Tensor]], sizes: list[int], span: slice) -> Iterator[Piece]:
    """The parts of parameters (group, parameter) that lie in ``span`` of the flat buffers."""
    place = 0
    for (group, p), size in zip(every, sizes, strict=True):
        start, stop = max(place, span.start), min(place + size, span.stop)
        if start < stop:
            yield Piece(group, p, start - place, stop - place, start - span.start)
        place += size


def pinned(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros on the host [size], page-locked for copies to ``device`` if that is a GPU.

    Registered with CUDA, and not from PyTorch's pinned allocator, which rounds up to the next power of two. Raises ConfigError where that
    fails.
    """
    buffer = torch.zeros(size, dtype=dtype)
    if device.type == "cuda" and size:
        runtime, address = torch.cuda.cudart(), buffer.data_ptr()
        code = int(runtime.cudaHostRegister(address, buffer.nbytes, 0))
        if code:
            raise ConfigError([
                f"optim.offload=true: CUDA cannot lock {buffer.nbytes / GIB:.3g} GiB of host memory (error {code}); raise the limit of "
                "locked memory (ulimit -l), or set optim.offload=false"
            ])  # fmt: skip
        weakref.finalize(buffer, runtime.cudaHostUnregister, address).atexit = False
    return buffer
