"""Debug modes: each names a fault that was put in on purpose, and leaves the numbers of a healthy run alone."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks
from tasks import merged, trajectory, with_run
from test_launch import command_line
from torch import Tensor

from ringattn.compose import compose_keys
from ringattn.kernels.torch_tiled import TorchKernel
from ringattn.train import config_folder
from ringattn.training.launch import Launch
from ringattn.training.loop import train
from ringattn.training.ring_check import CheckFailed, check_ring, oracle
from ringattn.training.run import Run
from ringattn.training.stop import Diverged

pytestmark = pytest.mark.ring


def test_a_healthy_run_stays_what_it_was(ranks: Ranks, raw: Callable[..., Any]) -> None:
    """check and profile to the bit, nan to rounding (its hooks change the order in which gradients are added)."""
    steps = {"train.steps": 3}
    plain = ranks.run(2, trajectory, raw(steps), False)
    looked_at = ranks.run(2, trajectory, raw(steps | {"debug.check": True, "debug.profile": [2], "name": "looked_at"}), False)
    assert looked_at["lines"] == plain["lines"]
    assert all(torch.equal(value, looked_at["parameters"][name]) for name, value in plain["parameters"].items())
    traces_are_there(Path(raw()["log"]["dir"]) / "looked_at" / "profile", 2)
    watched = ranks.run(2, trajectory, raw(steps | {"debug.nan": True, "name": "watched"}), False)
    for line, wanted in zip(watched["lines"], plain["lines"], strict=True):
        assert line == pytest.approx(wanted, rel=1e-6)


def traces_are_there(folder: Path, step: int) -> None:
    """A trace and a table of each of two ranks, of this step only."""
    names = [f"step-{step:08d}-rank{rank}" for rank in (0, 1)]
    assert sorted(p.name for p in folder.iterdir()) == sorted(n + end for n in names for end in (".json.gz", ".txt"))
    events = json.loads(gzip.decompress((folder / f"{names[1]}.json.gz").read_bytes()))["traceEvents"]
    assert any("ringattn::ring_forward" in str(e.get("name")) for e in events)
    text = (folder / f"{names[0]}.txt").read_text()
    assert "Most time" in text and "Most memory" in text and "ringattn::ring_backward" in text


@pytest.mark.parametrize(("arguments", "expected"), [
    (["debug=nan"], {"nan": True, "check": False, "profile": []}), (["debug=check"], {"nan": False, "check": True, "profile": []}),
    (["debug=profile", "debug.profile=[7]"], {"nan": False, "check": False, "profile": [7]}), (["debug.nan=true"], {"nan": True}),
])  # fmt: skip
def test_group_and_keys(arguments: list[str], expected: dict[str, Any]) -> None:
    """debug= is a group and debug.nan a key; to Hydra, nan alone is a number."""
    assert compose_keys(arguments, config_folder())["debug"].items() >= expected.items()


# --- nan ----------------------------------------------------------------------------------------------------------------


def spoil(run: Run, where: str, rank: int, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make one value infinite: in a module's output, in the gradient that it passes back, in a weight, or in the dk of a kernel."""
    kind, _, name = where.partition(" ")
    module = run.model.get_submodule(name)

    def now() -> bool:
        return run.step == step and run.mesh.rank == rank

    class PassBack(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(_ctx: Any, gradient: Any) -> Any:
            gradient = gradient.clone()
            gradient.flatten()[3] = float("inf")
            return gradient

    if kind == "output":
        def bad_output(_module: Any, _inputs: Any, output: Tensor) -> Tensor:
            return torch.where(torch.arange(output.shape[-1]) == 5, float("nan"), output) if now() else output

        module.register_forward_hook(bad_output, prepend=True)
    elif kind == "gradient":
        inner = module.forward
        module.forward = lambda x: inner(PassBack.apply(x) if now() else x)
    elif kind == "weight":
        def bad_weight(*_: Any) -> None:
            if now():
                next(module.parameters()).data.flatten()[0] = float("inf")

        module.register_forward_pre_hook(bad_weight)
    else:
        right = TorchKernel.backward

        def bad_backward(self: Any, *args: Any, **kwargs: Any) -> None:
            right(self, *args, **kwargs)
            if now():
                kwargs["dk"].flatten()[0] = float("inf")

        monkeypatch.setattr(TorchKernel, "backward", bad_backward)


def watched(launch: Launch, raw: dict[str, Any], where: str, rank: int, step: int) -> str:
    """What the run says that ends at the spoilt step; all ranks must end there."""

    def work(run: Run) -> str:
        with pytest.MonkeyPatch.context() as monkeypatch, pytest.raises(Diverged) as caught:
            spoil(run, where, rank, step, monkeypatch)
            train(run)
        assert run.step == step
        return str(caught.value)

    result: str = with_run(launch, raw, work)
    return result


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("output blocks.1.attention.out", "rank 1: the output of blocks.1.attention.out: 48 NaN and 0 infinite of 1536 values, "
         "shape [1, 48, 32], float32; its inputs are finite, its weights are finite"),
        ("weight blocks.1.attention.out", "rank 1: the output of blocks.1.attention.out: "),
        ("gradient blocks.0.attention.norm", "passed back by blocks.0.attention.norm (it was given a finite one): 0 NaN and 1 inf"),
        ("kernel", "rank 1: the gradient passed back by blocks.1.attention.attend, dk: "),
    ],
)  # fmt: skip
def test_the_first_bad_module_is_named(where: str, expected: str, ranks: Ranks, raw: Callable[..., Any]) -> None:
    """On two ranks, where the ring carries it on to the other one at the next layer; with recomputation in two of the cases."""
    activation = "none" if where.startswith(("output", "weight")) else "attention_saved"
    said = ranks.run(2, watched, raw({"debug.nan": True, "activation": activation}), where, 1, 2)
    assert said.startswith("step 3: debug.nan: this went bad first:") and expected in said, said
    assert ("its weights are not finite either" in said) == where.startswith("weight")
    assert said.count("\n  rank ") == 1


# --- check --------------------------------------------------------------------------------------------------------------


def wrong_attention(run: Run, tensor: str, rank: int) -> None:
    """Layer 1 of one rank computes something that is off by a few percent: in its output, or in a gradient only."""
    attention = run.model.blocks[1].attention
    right = attention.attend

    class Off(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(_ctx: Any, gradient: Any) -> Any:
            return gradient * 1.03

    def wrong(q: Tensor, k: Tensor, v: Tensor, handle: int, sinks: Tensor | None) -> Tensor:
        if run.mesh.rank == rank:
            q, k, v = (Off.apply(x) if tensor == f"d{name}" else x for name, x in (("q", q), ("k", k), ("v", v)))
        out = right(q, k, v, handle, sinks)
        return out * 1.03 if tensor == "out" and run.mesh.rank == rank else out

    attention.attend = wrong


def checked(launch: Launch, raw: dict[str, Any], tensor: str, rank: int) -> str:
    """What check_ring says, with a fault if a tensor is named."""

    def work(run: Run) -> str:
        if not tensor:
            return check_ring(run)
        wrong_attention(run, tensor, rank)
        with pytest.raises(CheckFailed) as caught:
            train(run)
        assert run.step == 0
        return str(caught.value)

    result: str = with_run(launch, raw, work)
    return result


@pytest.mark.parametrize("tensor", ["out", "dq", "dk", "dv"])
def test_a_fault_is_found_by_layer_tensor_and_rank(tensor: str, ranks: Ranks, raw: Callable[..., Any]) -> None:
    said = ranks.run(2, checked, raw({"debug.check": True}), tensor, 1)
    assert f"\n  - layer 1, {tensor}, rank 1: relative error 3.0e-02" in said, said
    assert "layer 0" not in said and (tensor == "out" or ("rank 0" not in said and said.count("  - layer") == 1))


@pytest.mark.parametrize(
    ("world_size", "changes"),
    [
        (1, {"parallel.virtual": 4, "parallel.exchange": "allgather"}),
        (2, {"parallel.layout": "striped", "parallel.virtual": 2, "model.softcap": 5.0, "train.micro_rows": 2}),
        (2, {"precision": "fp64", "debug.check_rows": 500, "debug.check_heads": 9}),
        (4, {"precision": "bf16", "parallel.ring": 2, "parallel.replicate": 2, "data.mask_documents": False}),
    ],
)
def test_right_attention_passes(world_size: int, changes: dict[str, Any], ranks: Ranks, raw: Callable[..., Any]) -> None:
    said = ranks.run(world_size, checked, raw(changes), "", 0)
    assert said.startswith("check: attention of 2 layers agrees with fp64"), said


def test_the_streamed_oracle_is_dense_attention(rng: Any) -> None:
    """Against the dense oracle and autograd, with rows that see nothing, a sink and a soft limit, over several chunks."""
    from oracle import make_mask, rel
    from oracle import oracle as dense

    from ringattn.kernels.intervals import mask_intervals
    from ringattn.ring.ring import Ring
    from ringattn.training import ring_check

    length, group = 96, 3
    mask = make_mask("documents and window", length, 2, rng)
    q, dout = (torch.randn(2, length, group, 16, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(2, length, 1, 16, dtype=torch.float64) for _ in range(2))
    sinks = torch.randn(group, dtype=torch.float64)
    own = torch.randperm(length)[:20].sort().values
    sparse = torch.zeros_like(dout)
    sparse[:, own] = dout[:, own]
    gold = dense(q, k, v, sparse, mask, softcap=3.0, sinks=sinks)
    lo, hi = (torch.from_numpy(x.copy())[:, own] for x in mask_intervals(length, **mask))
    before, ring_check.CHUNK = ring_check.CHUNK, 40
    try:
        rows = ring_check.Rows(own, lo, hi)
        got = oracle(q[:, own], k[:, :, 0], v[:, :, 0], dout[:, own], torch.arange(length), rows, Ring(), softcap=3.0, sinks=sinks)
    finally:
        ring_check.CHUNK = before
    wanted = {"out": gold.out[:, own], "dq": gold.grads[0][:, own], "dk": gold.grads[1][:, :, 0], "dv": gold.grads[2][:, :, 0],
              "dsinks": gold.grads[3]}  # fmt: skip
    assert got.keys() == wanted.keys() and all(rel(got[n], wanted[n]) < 1e-12 for n in wanted), {n: rel(got[n], wanted[n]) for n in wanted}


def failing_command(launch: Launch, folder: str, *arguments: str) -> tuple[int, str, str]:
    """The command line, with a kernel that is off."""
    right = TorchKernel.backward

    def wrong(self: Any, *args: Any, **kwargs: Any) -> None:
        right(self, *args, **kwargs)
        kwargs["dv"].mul_(1.5)

    TorchKernel.backward = wrong  # type: ignore[method-assign]
    try:
        return command_line(launch, folder, *arguments)
    finally:
        TorchKernel.backward = right  # type: ignore[method-assign]


def test_the_command_line_ends_with_its_own_code(ranks: Ranks, tmp_path: Path) -> None:
    start = ["experiment=cpu_tiny", "device=cpu", "debug=check", "train.steps=1", "train.seq_len=48", "log.report=false"]
    code, out, err = ranks.run(1, failing_command, str(tmp_path), *start)
    assert code == 6 and "layer 0, dv, rank 0" in err and "layer 1, dv, rank 0" in err and "Traceback" not in err
    assert not list(tmp_path.glob("runs/*/checkpoints/*"))
    code, out, err = ranks.run(1, command_line, str(tmp_path), *start)
    assert code == 0 and "check: attention of 2 layers agrees" in out and "done at step 1" in out, err


@pytest.mark.parametrize(("changes", "expected"), [
    ({"debug.nan": True, "compile": True}, "debug.nan=True: needs compile=false"),
    ({"debug.check": True, "compile": True}, "debug.check=True: needs compile=false"),
    ({"debug.check_rows": 0}, "debug.check_rows=0: must be 1 or more"),
    ({"debug.profile": [0]}, "debug.profile=[0]: must be a list of steps"),
    ({"debug.naan": True}, "debug.naan: unknown key, did you mean debug.nan?"),
])  # fmt: skip
def test_refused(changes: dict[str, Any], expected: str) -> None:
    from tasks import BASE

    from ringattn.config import ConfigError, from_dict

    with pytest.raises(ConfigError) as caught:
        from_dict(merged(BASE, {"data.path": "x"} | changes))
    assert len(caught.value.problems) == 1 and expected in caught.value.problems[0]
