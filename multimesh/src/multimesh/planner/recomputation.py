"""Recomputation: the parts of a layer that the backward pass computes again, and the bytes that are kept by name."""

from __future__ import annotations

from collections.abc import Mapping

from multimesh import schedules
from multimesh.planner.configuration import POLICIES, Configuration
from multimesh.planner.transformer import Transformer

PRODUCTS = ("into attention", "out of attention", "up", "down")
"""Matrix products of a layer, in the order in which it runs them; "up" is the gate, and the router, too."""

_COLLECTIVES = ("tensor parallelism", "context parallelism", "expert parallelism")


def list_names(how: Configuration) -> tuple[str, ...]:
    """Return the results of a layer that are kept by name; none where the policy is another."""
    return POLICIES.get(how.recompute, how.saved if how.recompute == "full" else ())


def count_again(model: Transformer, how: Configuration) -> Mapping[str, float]:
    """Return the share of each part of a layer's forward that the backward pass computes again.

    Parts are ``PRODUCTS``, "attention", "memory" (element-wise kernels), and "tensor", "context" and "expert
    parallelism" (their collectives). Where results are kept by name, XLA leaves out the last product of a dense MLP,
    which nothing reads.
    """
    names = list_names(how)
    if how.recompute in ("none", "latent"):
        return {}
    if how.recompute in ("selective", "minimal"):  # element-wise kernels are fused with those of the backward pass
        return {"attention": 1.0}
    if how.recompute == "alternate":
        return {**dict.fromkeys((*PRODUCTS, "tensor parallelism"), 0.5), "memory": 1.0}
    if not names:
        return dict.fromkeys((*PRODUCTS, "attention", "memory", *_COLLECTIVES), 1.0)
    widths = {"query": model.queries, "key": model.keys, "value": model.keys_and_values - model.keys}
    missing = sum(width for name, width in widths.items() if name not in names)
    products = {
        "into attention": missing / sum(widths.values()),
        "out of attention": float("out" not in names),
        "up": float("mlpwi" not in names),
        "down": float(bool(model.experts) and "mlpwo" not in names),
    }
    attention = float("context" not in names)
    sent = sum(products.values()) / 4, attention, (products["up"] + products["down"]) / 2  # one beside each product
    return {**products, "attention": attention, "memory": 1.0, **dict(zip(_COLLECTIVES, sent, strict=True))}


def count_times(how: Configuration) -> int:
    """Return how often these parts are computed again: for B and for W where MultiMesh has them apart.

    It keeps them together where all of a layer is computed again.
    """
    apart = how.pp > 1 and schedules.get(how.schedule).splits
    return 2 if apart and list_names(how) else 1


def count_bytes(model: Transformer, how: Configuration) -> float:
    """Return the bytes of the results that are kept by name, on a device, for a microbatch of a layer."""
    routed = model.active * how.load if model.experts else 0.0
    widths = {
        "query": model.queries + model.query_rank + model.kv_rank,
        "key": model.keys,
        "value": model.keys_and_values - model.keys,
        "context": model.values,
        "out": float(model.hidden),
        "mlpwi": model.mlp_width(how.load) * model.gates,
        "mlpwo": model.hidden * routed,
    }
    return 2.0 * how.tokens * sum(widths.get(name, 0.0) for name in list_names(how)) / how.tp
