"""Which kernel runs: one name in, one kernel object out.

``auto`` is resolved by device: on CUDA the fastest kernel that is available there, on CPU the tiled PyTorch kernel. A kernel may
refuse inputs (dtype, head dim, feature); ``auto`` then goes down its chain, an explicit name raises. The outcome depends only on
the device and the inputs' dtype and head dim, so equal ranks choose alike; the ring agrees on it at start-up all the same.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import lru_cache

import torch
from torch import Tensor

from ringattn.kernels.contract import Kernel
from ringattn.kernels.vendor import VENDORS, VendorKernel

KERNELS = ("auto", "gluon", "triton", "torch", "reference")  # of this package; those of others are VENDORS
_MODULES = {
    "gluon": ("ringattn.kernels.gluon_kernel", "GluonKernel"),
    "triton": ("ringattn.kernels.triton_kernel", "TritonKernel"),
    "torch": ("ringattn.kernels.torch_tiled", "TorchKernel"),
    "reference": ("ringattn.kernels.reference", "ReferenceKernel"),
}


@lru_cache(maxsize=16)
def load_kernel(name: str) -> Kernel:
    """The kernel of this name (not ``auto``). Kernels hold no state but compiled code, so one object serves everybody.

    Raises ValueError for an unknown name, ImportError where the kernel's library is not installed.
    """
    if name in VENDORS:
        return VendorKernel(name)
    if name not in _MODULES:
        raise ValueError(f"kernel={name!r} is unknown, choose from {', '.join(KERNELS + VENDORS)}")
    module, cls = _MODULES[name]
    return getattr(importlib.import_module(module), cls)()


@lru_cache(maxsize=16)
def chain(name: str, device_type: str) -> tuple[str, ...]:
    """The kernels that ``name`` may stand for on this device, in order of preference."""
    if name != "auto":
        if name not in _MODULES and name not in VENDORS:
            raise ValueError(f"kernel={name!r} is unknown, choose from {', '.join(KERNELS + VENDORS)}")
        return (name,)
    if device_type != "cuda":
        return ("torch",)
    names = ["torch"]
    if importlib.util.find_spec("triton") is not None:
        names.insert(0, "triton")
        if _gluon_works():
            names.insert(0, "gluon")
    return tuple(names)


def _gluon_works() -> bool:
    if importlib.util.find_spec(_MODULES["gluon"][0]) is None:
        return False
    module = importlib.import_module(_MODULES["gluon"][0])
    return module.GluonKernel.available(torch.device("cuda", torch.cuda.current_device())) is None


def select_kernel(
    name: str, q: Tensor, k: Tensor, *, softcap: float | None = None, sinks: Tensor | None = None, deterministic: bool = False,
) -> Kernel:
    """The kernel for these inputs. Raises ValueError with the refusal if an explicitly named kernel cannot take them."""
    reasons = []
    for candidate in chain(name, q.device.type):
        kernel = load_kernel(candidate)
        reason = kernel.refusal(q, k, softcap=softcap, sinks=sinks)
        if reason is None and deterministic and not getattr(kernel, "deterministic", True):
            reason = "its backward adds dq in no fixed order"
        if reason is None:
            return kernel
        reasons.append(f"kernel={candidate!r}: {reason}")
    raise ValueError("; ".join(reasons))


def check_hops(kernel: Kernel, hops: int) -> None:
    """Raise ValueError if the kernel cannot carry the softmax's state and attention takes more than one hop."""
    if hops > 1 and getattr(kernel, "single_hop", False):
        raise ValueError(f"kernel={kernel.name!r} takes a whole sequence at once: it cannot be used in a ring of {hops}, only in one of 1")
