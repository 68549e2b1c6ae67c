"""The header of a run: what is trained, on what, how it is spread, and what a step will cost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ringattn import cost
from ringattn.training.console import picture, short
from ringattn.training.parallelize import precision

if TYPE_CHECKING:
    from ringattn.training.run import Run


def introduce(run: Run, found: Path | None, notes: list[str]) -> None:
    """Print the header, where the run goes on from, and whatever else the user should know before the first step."""
    layout = run.batches.first(run.step).layout
    planned = f"{run.placement.kind}, planned for each batch; the first: " if run.placement.fixed is None else ""
    ring = [f"{planned}{layout.kind}, positions 0-{layout.seq_len - 1}"]
    ring += picture(layout, run.mesh.ring.virtual, fancy=run.console.fancy)
    rows = [*model_rows(run), *mesh_rows(run), *cost_rows(run), ("files", str(run.folder.path))]
    run.console.header(f"ringattn: {run.config.name}", rows, ring)
    if found is not None:
        run.console.note(f"resumed from {found.name}, step {run.step}")
    for note in notes:
        run.console.note(f"note: {note}")


def model_rows(run: Run) -> list[tuple[str, str]]:
    """The network, the corpus, and how much of it a step takes."""
    m, data, train = run.model_config, run.dataset, run.config.train
    passes = f"{run.batches.micro_batches} forward pass" + ("es" if run.batches.micro_batches > 1 else "")
    return [
        ("model", f"{m.name}: {short(m.parameters())} parameters, {m.layers} layers, width {m.width}"),
        ("", f"{m.heads} heads ({m.kv_heads} KV) of {m.head_dim}, vocabulary {m.vocab_size}"),
        ("data", f"{data.name}: {short(data.tokens)} tokens, {data.val_rows} validation rows"),
        ("step", f"{train.rows} rows x {train.seq_len} = {run.tokens_per_step:,} tokens, {passes} a rank"),
        *padding_rows(train.seq_len, run.placement.seq_len),
    ]


def padding_rows(seq_len: int, padded: int) -> list[tuple[str, str]]:
    """What padding the rows to a length that the layout can split costs, if anything."""
    if padded == seq_len:
        return []
    more = f"{padded / seq_len - 1:.2%}"
    return [("padding", f"rows of {seq_len} padded to {padded}: {more} more in all that is done row by row, none in attention")]


def mesh_rows(run: Run) -> list[tuple[str, str]]:
    """How the run is spread over the processes."""
    p, ring, device = run.config.parallel, run.mesh.ring, run.mesh.device
    threads = torch.get_num_threads()
    cpu = f"CPU, {threads} thread{'s' if threads > 1 else ''} a rank"
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu
    virtual = f" x {ring.virtual} virtual" if ring.virtual > 1 else ""
    nodes = f" ({ring.inner} shards a node)" if ring.inner else ""
    heads = f" x ulysses {ring.ulysses}" if ring.ulysses > 1 else ""
    return [("mesh", f"replicate {p.replicate} x shard {p.shard} x ring {ring.processes}{virtual}{nodes}{heads} on {kind}")]


def cost_rows(run: Run) -> list[tuple[str, str]]:
    """What a step costs (at most: documents only lessen it), what it is predicted to take, and the path that its numbers take."""
    c, m = run.config, run.model_config
    _, compute = precision(c, run.mesh.device)
    pairs = [c.train.rows * cost.visible_pairs(c.train.seq_len, window=w) for w in m.distinct_windows]
    flops = cost.step_flops(m, tokens=run.tokens_per_step, pairs=pairs, policy=c.activation)
    dtype = {torch.bfloat16: "bf16 (fp32 weights and sums)", torch.float32: "fp32", torch.float64: "fp64"}[compute]
    compiled = "compiled" if c.compile else "eager"
    wire = "" if c.parallel.wire == "exact" else f", wire {c.parallel.wire}"
    return [
        ("cost", f"up to {short(flops.total + flops.recompute, 'FLOP')} a step"),
        *(("", line) for line in run.forecast.lines()),
        ("path", f"kernel {run.kernel}, exchange {c.parallel.exchange}{wire}, {dtype}, activations {c.activation}, {compiled}"),
    ]
