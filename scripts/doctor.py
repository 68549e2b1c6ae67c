"""Is this machine fit to train, and if not, what is to be done? Looks, measures a little, writes nothing that stays.

    python scripts/doctor.py                                                 # this machine
    torchrun --standalone --nproc-per-node 8 scripts/doctor.py               # and the links between its GPUs
    torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 scripts/doctor.py    # and between nodes
    python scripts/doctor.py --dir /shared/runs --device cpu                 # where runs will be written; without GPUs

A line a subject: ok, look (works, but could bite) or BAD (will not work), and what to do about the last two. Ranks that differ are
named. Exit code 0 if nothing is BAD, 1 otherwise. Takes some seconds.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import math
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringattn.kernels.flash import flash_attention
from ringattn.kernels.select import chain, load_kernel
from ringattn.training.console import binary
from ringattn.training.preflight import host_memory

OK, LOOK, BAD = "ok", "look", "BAD"
LEAST_TORCH = (2, 9)
MEET_S = 60.0  # how long ranks are waited for
MESSAGE_BYTES = 2**24  # of the bandwidth test
SLOW_GB_PER_S = {"cuda within a node": 20.0, "cuda between nodes": 2.0}
BANDS = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


@dataclass
class Doctor:
    """What was found on this rank: (state, subject, text, what to do)."""

    findings: list[tuple[str, str, str, str]] = field(default_factory=list)

    def say(self, state: str, subject: str, text: str, advice: str = "") -> None:
        """Note one finding."""
        self.findings.append((state, subject, text, advice))

    def examine(self, subject: str, look: Callable[[], None]) -> None:
        """Run one examination; whatever goes wrong in it is a finding and no end of the others."""
        try:
            look()
        except Exception as error:
            said = (str(error).splitlines() or [""])[0][:200]
            self.say(BAD, subject, f"the examination itself failed ({type(error).__name__}: {said})", "please report this line")


def versions(doctor: Doctor) -> None:
    """Python and the libraries that matter."""
    names = ("torch", "triton", "hydra-core", "omegaconf", "numpy", "ringattn")
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    text = f"Python {platform.python_version()}, " + ", ".join(f"{n} {v}" for n, v in found.items())
    torch_version = tuple(int(x) for x in torch.__version__.split("+")[0].split(".")[:2])
    if torch_version < LEAST_TORCH:
        doctor.say(BAD, "versions", text, "torch 2.9 or newer is needed: pip install -U torch")
    elif found["hydra-core"] == "not installed":
        doctor.say(BAD, "versions", text, "pip install -e . in the source tree installs what is missing")
    elif found["triton"] == "not installed" and torch.cuda.is_available():
        doctor.say(LOOK, "versions", text, "without triton the GPU runs the slow PyTorch kernel: pip install triton")
    else:
        doctor.say(OK, "versions", text)


def gpus(doctor: Doctor, device: torch.device, local_rank: int, local_world_size: int) -> None:
    """The GPU of this rank, or why there is none."""
    if device.type == "cpu":
        card = shutil.which("nvidia-smi") is not None or os.path.exists("/dev/nvidiactl")
        if torch.version.cuda is None:
            text = "none used: this torch is built without CUDA"
            doctor.say(LOOK if card else OK, "gpu", text, "there is an NVIDIA GPU: install torch's build for your CUDA" if card else "")
        elif torch.cuda.is_available():
            doctor.say(OK, "gpu", f"{torch.cuda.device_count()} there, none used (--device cpu)")
        else:
            advice = "nvidia-smi shows whether the driver works; CUDA_VISIBLE_DEVICES may hide the GPUs" if card else ""
            doctor.say(LOOK if card else OK, "gpu", f"none found (torch for CUDA {torch.version.cuda})", advice)
        return
    if not torch.cuda.is_available():
        doctor.say(BAD, "gpu", "asked for, and torch finds none", "nvidia-smi and torch.version.cuda show why; --device cpu does without")
        return
    if local_rank >= torch.cuda.device_count():
        text = f"{local_world_size} ranks on this host, but {torch.cuda.device_count()} GPUs"
        doctor.say(BAD, "gpu", text, f"torchrun --nproc-per-node {torch.cuda.device_count()}; parallel.virtual makes a ring longer")
        return
    torch.cuda.set_device(device)
    p = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    text = f"{p.name}, {binary(total)}, compute capability {p.major}.{p.minor}, CUDA {torch.version.cuda}"
    if (p.major, p.minor) < (8, 0):
        doctor.say(LOOK, "gpu", text, "below capability 8.0 only kernel=torch works, and bf16 is slow: use precision=fp32")
    elif free < 0.9 * total:
        doctor.say(LOOK, "gpu", f"{text}, {binary(total - free)} of it taken", "nvidia-smi shows by whom")
    else:
        doctor.say(OK, "gpu", text)


def links(doctor: Doctor) -> None:
    """Which GPUs of this machine reach each other directly."""
    count = torch.cuda.device_count()
    if count < 2:
        return
    pairs = [(a, b) for a in range(count) for b in range(a + 1, count) if not torch.cuda.can_device_access_peer(a, b)]
    try:
        topology = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        topology = ""
    nvlink = sum(line.count("NV") for line in topology.splitlines() if line.startswith("GPU")) > 0
    text = f"{count} GPUs, {'NVLink' if nvlink else 'PCIe only, or nvidia-smi does not tell'}"
    if pairs:
        text += f", no direct access between {', '.join(f'{a}-{b}' for a, b in pairs[:4])}"
        doctor.say(LOOK, "links", text, "messages between these go through the host: keep parallel.transport=p2p, expect a slower ring")
    else:
        doctor.say(OK, "links", text + ", all reach each other directly")


def host(doctor: Doctor, folder: str, local_world_size: int) -> None:
    """Cores, threads, memory, open files, the host's own name, and room on disk."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads, memory = int(os.environ.get("OMP_NUM_THREADS", "0") or 0), host_memory()
    text = f"{cores} cores for {local_world_size} rank{'s' if local_world_size > 1 else ''}"
    text += f", {binary(memory)} of memory" if memory else ""
    if threads * local_world_size > cores:
        advice = f"OMP_NUM_THREADS={threads} on each of them is too much: {max(1, cores // local_world_size)} fits"
        doctor.say(LOOK, "host", text, advice)
    else:
        doctor.say(OK, "host", text)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit != resource.RLIM_INFINITY and limit < 1024:
        doctor.say(LOOK, "open files", f"at most {limit}", "ulimit -n 4096: many ranks and shards of data open many")
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
        doctor.say(OK, "name", f"{name} resolves")
    except OSError:
        advice = "give torchrun --local-addr: 127.0.0.1 on one machine, else its address"
        doctor.say(LOOK, "name", f"{name} does not resolve to an address", advice)
    disk(doctor, folder)


def disk(doctor: Doctor, folder: str) -> None:
    """Whether runs can be written, and how much room there is."""
    place = Path(folder).absolute()
    while not place.exists():
        place = place.parent
    if not place.is_dir():
        doctor.say(BAD, "disk", f"{place} is a file, and runs are to be written to {folder}", "give log.dir another folder")
        return
    free = shutil.disk_usage(place).free
    text = f"{binary(free)} free in {place}"
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".ringattn-doctor-") as file:
            file.write(bytes(2**24))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        doctor.say(BAD, "disk", f"{text}, cannot be written to ({error.strerror})", "give log.dir a folder that can, or make room")
        return
    if free < 10 * 2**30:
        doctor.say(LOOK, "disk", text, "a checkpoint of 1B parameters takes 12 GiB: fewer (checkpoint.keep=1), or another log.dir")
    else:
        doctor.say(OK, "disk", text)


def kernels(doctor: Doctor, device: torch.device) -> None:
    """Each kernel that kernel=auto may take here, beside fp64, forward and backward."""
    names = chain("auto", device.type)
    for name in names:
        for dtype in (torch.bfloat16, torch.float32):
            kernel = load_kernel(name)
            q, k, v, dout = (torch.randn(1, 256, heads, 64, device=device, dtype=dtype) for heads in (4, 2, 2, 4))
            refusal = kernel.refusal(q, k, softcap=None, sinks=None)
            label = f"{name}, {str(dtype).removeprefix('torch.')}"
            if refusal is not None:
                doctor.say(OK, "kernel", f"{label}: not for this ({refusal})")
                continue
            got, gold = (attention(x, n) for x, n in (((q, k, v, dout), name), (tuple(t.double() for t in (q, k, v, dout)), "reference")))
            errors = [float((a.double() - b).norm() / b.norm()) for a, b in zip(got, gold, strict=True)]
            worst = max(errors, key=lambda e: math.inf if math.isnan(e) else e)
            if worst <= BANDS[dtype]:
                doctor.say(OK, "kernel", f"{label}: out, dq, dk, dv are within {BANDS[dtype]:.0e} of fp64")
            else:
                text = f"{label}: is off by {worst:.1e} beside fp64, {BANDS[dtype]:.0e} would be rounding"
                doctor.say(BAD, "kernel", text, f"do not train with kernel={name}: scripts/check_kernel.py looks closer; please report it")


def attention(tensors: tuple[Tensor, ...], kernel: str) -> list[Tensor]:
    """out, dq, dk, dv."""
    leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    out = flash_attention(*leaves, kernel=kernel)
    assert isinstance(out, Tensor)
    return [out.detach(), *torch.autograd.grad(out, leaves, tensors[3])]


def meet(doctor: Doctor, device: torch.device) -> bool:
    """Open the process group and add something up over all ranks."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    world_size = int(os.environ["WORLD_SIZE"])
    advice = "all nodes must reach the first one's port; NCCL_SOCKET_IFNAME (GLOO_SOCKET_IFNAME) chooses an interface"
    try:
        dist.init_process_group(
            f"cpu:gloo,cuda:{backend}" if device.type == "cuda" else backend, timeout=datetime.timedelta(seconds=MEET_S),
        )
        total = torch.ones(1, device=device)
        dist.all_reduce(total)
        count = int(total.item())
    except (RuntimeError, ValueError) as error:
        doctor.say(BAD, "ranks", f"{world_size} ranks do not meet over {backend} ({str(error).splitlines()[0][:160]})", advice)
        return False
    if count != world_size:
        doctor.say(BAD, "ranks", f"{backend}: a sum over {world_size} ranks gave {count}", "something between the ranks is broken")
        return False
    version = ".".join(map(str, torch.cuda.nccl.version())) if device.type == "cuda" else ""
    doctor.say(OK, "ranks", f"{world_size} meet over {backend}{' ' + version if version else ''}")
    return True


def bandwidth(doctor: Doctor, device: torch.device, hosts: list[str]) -> None:
    """Messages to the next rank and from the one before, as the ring sends them."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    out = torch.full((MESSAGE_BYTES // 4,), float(rank), device=device)
    into, seconds = torch.empty_like(out), []
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    for _ in range(4):
        dist.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, out, after), dist.P2POp(dist.irecv, into, before)]):
            work.wait()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    speed = MESSAGE_BYTES / min(seconds) / 1e9
    path = "within a node" if hosts[rank] == hosts[after] else "between nodes"
    text = f"{rank} -> {after} ({path}): {speed:.2f} GB/s each way, messages of {binary(MESSAGE_BYTES)}"
    slow = SLOW_GB_PER_S.get(f"{device.type} {path}", 0.0)
    if not bool((into == float(before)).all()):
        doctor.say(BAD, "link", f"{text}, and what arrived is not what was sent", "do not train over this link: try another interface")
    elif speed < slow:
        within = path == "within a node"
        more = "nvidia-smi topo -m shows how GPUs are connected" if within else "NCCL_DEBUG=INFO shows whether RDMA is used"
        doctor.say(LOOK, "link", text, f"below {slow:g} GB/s the ring will wait for it: {more}")
    else:
        doctor.say(OK, "link", text)


def compare(everyone: list[list[tuple[str, str, str, str]]], hosts: list[str]) -> list[tuple[str, str, str, str]]:
    """The findings of all ranks as few lines: what all say once, else with the ranks that say it."""
    ranks: dict[tuple[str, str, str, str], list[int]] = {}
    for rank, findings in enumerate(everyone):
        for finding in findings:
            ranks.setdefault(finding, []).append(rank)
    order = list(dict.fromkeys(f[1] for f in ranks))
    lines = []
    for (state, subject, text, advice), who in sorted(ranks.items(), key=lambda x: (order.index(x[0][1]), x[1])):
        whole = len(who) == len(everyone)
        shown = ", ".join(map(str, who[:8])) + (", ..." if len(who) > 8 else "")
        named = "" if whole or subject == "link" else f"rank{'s' if len(who) > 1 else ''} {shown} ({hosts[who[0]]}): "
        lines.append((state, subject, named + text, advice))
    said = {f[2] for findings in everyone for f in findings if f[1] == "versions"}
    if len(said) > 1:
        lines.append((BAD, "versions", "differ between ranks", "install the same on all nodes: kernels and checkpoints must agree"))
    return lines


def show(lines: list[tuple[str, str, str, str]]) -> int:
    """Print the lines; the exit code."""
    for state, subject, text, advice in lines:
        print(f"{state:>4}  {subject:<10} {text}")
        if advice and state != OK:
            print(f"{'':>16} -> {advice}")
    bad, look = (sum(line[0] == state for line in lines) for state in (BAD, LOOK))
    if bad:
        print(f"\n{bad} thing{'s' if bad > 1 else ''} will not work: see BAD above.")
    else:
        print("\nReady to train." + (f" {look} thing{'s' if look > 1 else ''} to look at." if look else ""))
    sys.stdout.flush()
    return 1 if bad else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", default="runs", help="where runs will be written (log.dir)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    args = parser.parse_args()
    env = os.environ
    world_size, local_rank = int(env.get("WORLD_SIZE", "1")), int(env.get("LOCAL_RANK", "0"))
    local_world_size = int(env.get("LOCAL_WORLD_SIZE", "1"))
    cuda = args.device == "cuda" or (args.device == "auto" and torch.cuda.is_available())
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    torch.manual_seed(0)

    doctor = Doctor()
    doctor.examine("versions", lambda: versions(doctor))
    doctor.examine("gpu", lambda: gpus(doctor, device, local_rank, local_world_size))
    doctor.examine("host", lambda: host(doctor, args.dir, local_world_size))
    usable = not any(f[0] == BAD and f[1] == "gpu" for f in doctor.findings)
    if cuda:
        doctor.examine("links", lambda: links(doctor))
    if usable:
        doctor.examine("kernel", lambda: kernels(doctor, device))
    # Ranks that have no GPU cannot take part over NCCL; they all meet over gloo then, to say so together.
    if world_size == 1:
        return show(compare([doctor.findings], [socket.gethostname()]))
    common = device if local_world_size <= torch.cuda.device_count() else torch.device("cpu")
    if not meet(doctor, common):
        return show(doctor.findings)
    hosts: list[Any] = [None] * world_size
    dist.all_gather_object(hosts, socket.gethostname())
    doctor.examine("link", lambda: bandwidth(doctor, common, hosts))
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, doctor.findings)
    lines = compare(everyone, hosts)
    code = show(lines) if dist.get_rank() == 0 else int(any(line[0] == BAD for line in lines))
    dist.barrier()  # torchrun ends all ranks when the first one leaves
    dist.destroy_process_group()
    return code


if __name__ == "__main__":
    sys.exit(main())
