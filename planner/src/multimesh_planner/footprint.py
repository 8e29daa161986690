"""Bytes that a device holds at the peak of a training step, and what the backward pass computes again for fewer."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from multimesh import schedules
from multimesh_planner.configuration import POLICIES, Configuration
from multimesh_planner.hardware import kernels
from multimesh_planner.hardware.software import Software
from multimesh_planner.transformer import Transformer

PRODUCTS = ("into attention", "out of attention", "up", "down")
"""Matrix products of a layer, in the order in which it runs them; "up" is the gate, and the router, too."""

_SCORES = 5.0  # bytes that unfused attention keeps for a score: of softmax, of its dropout, and the mask
_PERMUTED = 1.5  # arrays of tokens in the order of their experts: one, and two where probabilities weigh what comes out
_GATHERED = 2.0  # arrays of a width of the model that tensor parallelism gathers at a time: an input and its gradient
_TWO = 2.0  # layers whose gathered parameters, or offloaded activations, are on the device at a time
_COLLECTIVES = ("tensor parallelism", "context parallelism", "expert parallelism")


def list_names(how: Configuration) -> tuple[str, ...]:
    """Return the results of a layer that are kept by name; none where the policy is another."""
    return POLICIES.get(how.recompute, how.saved if how.recompute == "full" else ())


def count_again(model: Transformer, how: Configuration) -> Mapping[str, float]:
    """Return the share of each part of a layer's forward that the backward pass computes again.

    Parts are ``PRODUCTS``, "attention", "memory" (element-wise kernels), and "tensor", "context" and "expert
    parallelism" (their collectives). Where results are kept by name, XLA leaves out the last product of a dense MLP,
    which nothing reads, and MultiMesh computes for B and for W where it has them apart.
    """
    if how.recompute in ("none", "latent"):
        return {}
    if how.recompute in ("selective", "minimal"):  # element-wise kernels are fused with those of the backward pass
        return {"attention": 1.0}
    if how.recompute == "alternate":
        return {**dict.fromkeys((*PRODUCTS, "tensor parallelism"), 0.5), "memory": 1.0}
    names = list_names(how)
    if not names:
        return dict.fromkeys((*PRODUCTS, "attention", "memory", *_COLLECTIVES), 1.0)
    widths = {"query": model.queries, "key": model.keys, "value": model.keys_and_values - model.keys}
    missing = sum(width for name, width in widths.items() if name not in names)
    out, up, attention = (float(name not in names) for name in ("out", "mlpwi", "context"))
    down = float(bool(model.experts) and "mlpwo" not in names)
    products = missing / sum(widths.values()), out, up, down
    sent = sum(products) / 4, attention, (up + down) / 2  # one beside each product
    times = 2 if how.pp > 1 and schedules.get(how.schedule).splits else 1
    parts, shares = (*PRODUCTS, *_COLLECTIVES, "attention", "memory"), (*products, *sent, attention, 1.0)
    return {name: times * share for name, share in zip(parts, shares, strict=True)}


def residual_bytes(model: Transformer, how: Configuration, software: Software) -> float:
    """Return the bytes that a layer keeps of a microbatch for its backward pass."""
    if how.offload:
        return 0.0
    if how.recompute != "none" and how.recomputed < 1:
        most = residual_bytes(model, how.with_policy(recompute="none"), software)
        less = residual_bytes(model, how.with_policy(recomputed=1.0), software)
        return how.recomputed * less + (1 - how.recomputed) * most
    spread = how.tp if how.sequence_parallel else 1
    width = model.mlp_width(how.load)
    up = width * model.gates
    ranks = model.query_rank + model.kv_rank
    names = list_names(how)
    if how.recompute == "full" or names:
        widths = {
            "query": model.queries + ranks,
            "key": model.keys,
            "value": model.keys_and_values - model.keys,
            "context": model.values,
            "out": float(model.hidden),
            "mlpwi": up,
            "mlpwo": model.hidden * model.active * how.load,
        }
        named = 2.0 * how.tokens * sum(widths.get(name, 0.0) for name in names) / how.tp
        return 2.0 * how.tokens * model.hidden / spread + named
    if how.recompute == "minimal":
        products = model.queries + model.keys_and_values + up
        return 2.0 * how.tokens * (2 * model.hidden + ranks + products) / how.tp
    if how.recompute == "alternate":
        products = model.queries + model.keys_and_values / 2 + model.values + width
        return 2.0 * how.tokens * (model.hidden / spread + (ranks + products) / how.tp)
    # share of bfloat16 that an input of a product takes: of two narrow copies, by rows and by columns, some keep one
    size = min(1.0, kernels.BYTES[how.precision] / (2 if software.keeps_one_copy else 1))
    between = 2.0 * (model.hidden + ranks) / spread + (model.queries + model.keys_and_values + up) / how.tp
    inputs = 2.0 * model.hidden / spread + (model.values + width) / how.tp
    permuted = _PERMUTED * model.active * how.load * model.hidden / how.tp
    total = 2.0 * how.tokens * (between + size * (inputs + permuted))
    if how.recompute == "latent":
        total -= 2.0 * how.tokens * (model.queries + model.keys_and_values) / how.tp
    if not software.fused_attention and how.recompute != "selective":
        total += _SCORES * how.tokens * how.sequence * model.heads / how.tp
    return total


@dataclass(frozen=True)
class Footprint:
    """Bytes of a device of a submesh."""

    # parameters, gradients, optimizer: all the time
    parameters: float
    gradients: float
    optimizer: float
    activations: float  # of the microbatches in flight
    workspace: float  # of a layer that runs again, and the logits
    libraries: float  # of the driver, libraries and buffers of collectives

    @property
    def total(self) -> float:
        """All bytes together."""
        return sum(vars(self).values())


def peak_bytes(model: Transformer, how: Configuration, software: Software) -> tuple[Footprint, ...]:
    """Return the bytes of a device of each submesh at the peak."""
    layer = layer_bytes(model, how, software)
    if how.pp == 1:
        return of_rows(model, how, software, {0: how.stages}, layer)
    few = min(how.microbatches, 4 * how.pp + how.microbatches % how.pp)  # as many in flight as of all
    waiting = count_waiting(how.schedule, how.pp, how.interleave, few)
    rows = of_rows(model, how, software, {row: number for row, (number, _) in enumerate(waiting)}, layer)
    if how.recompute != "full" or list_names(how) or not schedules.get(how.schedule).splits:
        return rows
    # B computed a layer again and does not leave it to W: what it computed waits, unless W follows at once
    one = residual_bytes(model, how.with_policy(recompute="none"), software) * model.layers / how.stages
    return tuple(
        dataclasses.replace(row, activations=row.activations + (late * one if late > 1 else 0.0))
        for row, (_, late) in zip(rows, waiting, strict=True)
    )


@functools.lru_cache(maxsize=4096)
def count_waiting(schedule: str, pp: int, chunks: int, microbatches: int) -> tuple[tuple[int, int], ...]:
    """Return the most activations that each submesh has at once, and the most microbatches whose W is yet to run."""
    table = schedules.get(schedule).table(pp, chunks, microbatches, True)
    late = [max(itertools.accumulate((cell.phase == "B") - (cell.phase == "W") for cell in row)) for row in table]
    return tuple(zip(map(_count_activations, table), late, strict=True))


def _count_activations(row: Sequence[schedules.Cell]) -> int:
    last = "W" if any(cell.phase == "W" for cell in row) else "B"
    forward = {(cell.stage, cell.microbatch) for cell in row if cell.phase == "F"}
    peak = number = 0
    for cell in row:
        if cell.phase == "F":
            number += 1
        elif cell.phase == last:  # the last stage's forward may be a part of its backward
            peak = max(peak, number + ((cell.stage, cell.microbatch) not in forward))
            number -= (cell.stage, cell.microbatch) in forward
        peak = max(peak, number)
    return peak


def layer_bytes(model: Transformer, how: Configuration, software: Software) -> tuple[float, float]:
    """Return the bytes that a layer keeps of a microbatch, and those of a layer that runs.

    The latter are those that it computes again, and of the arrays and parameters that it gathered.
    """
    copies = uncut = 0.0
    if software.masks_groups and model.experts:
        how = how.with_policy(load=how.load * how.ep)
        rows = 2.0 * how.tokens * model.active * how.load
        copies = rows * (model.hidden + model.expert / how.expert_tp) * model.experts / how.ep  # both operands of W
        if how.recompute == "minimal" and not how.offload:  # it keeps what leaves the experts, but not their gates
            uncut = rows * (model.hidden - (model.gates - 1) * model.expert / how.expert_tp)
    again = 0.0
    if how.recompute not in ("none", "selective"):
        again = residual_bytes(model, how.with_policy(recompute="none", offload=False), software)
    if how.offload:
        again = max(again, _TWO * residual_bytes(model, how.with_policy(offload=False), software))
    gathered = _GATHERED * 2.0 * how.tokens * model.hidden if how.sequence_parallel and how.tp > 1 else 0.0
    if how.shards > 1 and not how.gather_once:  # sharding brings parameters of two layers, bfloat16
        gathered += _TWO * 2.0 * sum(model.split_parameters(how.tp, how.ep * how.tp, sparse=1.0))
    return residual_bytes(model, how, software) + uncut, again + gathered + copies


def of_rows(
    model: Transformer, how: Configuration, software: Software, in_flight: Mapping[int, int], layer: tuple[float, float]
) -> tuple[Footprint, ...]:
    """Return the bytes of a device of some submeshes, each with so many activations of stages in flight."""
    sizes = how.count_layers(model.layers)
    route = schedules.get(how.schedule).placement(how.pp) if how.pp > 1 else (0,)
    rows, last = _stages_of_rows(route, how.stages), how.stages - 1
    spread, of_state = how.shards, software.master_bytes + how.moment_bytes
    split = max(1.0, spread / how.ep) if how.ep > 1 else spread
    gathered = how.sequence_parallel and how.tp > 1
    footprints = []
    for row, number in in_flight.items():
        first, ends = 0 in rows[row], last in rows[row]
        layers = sum(sizes[stage] for stage in rows[row])
        dense = min(layers, model.dense_layers) if first else 0
        sparse = layers - dense + (model.predicted if ends and model.experts else 0)
        always, routed = model.split_parameters(how.tp, how.ep * how.expert_tp, dense=dense, sparse=sparse)
        embeddings = first + (ends and not (model.tied and first))
        always += embeddings * model.embedding_parameters / how.tp
        parameters = always / spread + routed / split
        state = always / how.state_shards + routed / (how.expert_replicas if how.sharded != "none" else split)
        once = always + routed - parameters if how.gather_once else 0.0
        gradients = always + routed if how.gather_once or how.reduce_once else parameters
        one = 2.0 * model.embedding_parameters / how.tp if spread > 1 else 0.0  # an end that sharding gathers
        head = 0.0 if software.keeps_ends else one
        if ends:
            logits = min(how.tokens, software.loss_tokens) * model.vocabulary
            head += software.logit_bytes * logits / (1 if software.gathers_logits else how.tp)
            head += 2.0 * how.tokens * model.hidden if gathered else 0.0  # its gathered input
        footprints.append(
            Footprint(
                parameters * software.parameter_bytes + 2.0 * once,
                gradients * software.gradient_bytes,
                0.0 if how.offload_optimizer else state * of_state,
                layers / len(rows[row]) * number * layer[0],
                max(head, layer[1]) + (2 * embeddings * one if software.keeps_ends else 0.0),
                software.reserved,
            )
        )
    return tuple(footprints)


@functools.lru_cache(maxsize=1024)
def _stages_of_rows(route: tuple[int, ...], count: int) -> Mapping[int, Sequence[int]]:
    """Return the stages of each submesh, from the submeshes of a schedule's first stages."""
    stages: dict[int, list[int]] = {}
    for stage, row in zip(range(count), itertools.cycle(route), strict=False):
        stages.setdefault(row, []).append(stage)
    return stages
