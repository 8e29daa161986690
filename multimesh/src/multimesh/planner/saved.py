"""Results of a layer that full recomputation keeps by name, as JAX's policies do: what then runs again, and their bytes."""

from __future__ import annotations

from multimesh.planner.configuration import Configuration
from multimesh.planner.transformer import Transformer


def again(model: Transformer, how: Configuration) -> float:
    """Return the share of a layer's forward, by operations, that the backward pass computes again.

    The last product of a dense MLP is left out where a name is given: XLA finds that nothing reads it.
    """
    if not how.saved:
        return 1.0
    width = model.expert * model.active + model.shared_ffn if model.experts else model.ffn
    out = model.values * model.hidden
    both = 0.0 if model.kv_rank else model.keys_and_values * model.hidden
    parts = {
        "query": model.attention_parameters - out - both,
        "key": both / 2,
        "value": both / 2,
        "context": model.seen(how.sequence) * (model.queries + model.values) / 2,
        "out": out,
        "mlpwi": float(width * model.gates * model.hidden),
        "mlpwo": float(width * model.hidden),
    }
    left_out = {*how.saved, *(() if model.experts else ("mlpwo",))}
    return sum(size for name, size in parts.items() if name not in left_out) / sum(parts.values())


def saved_bytes(model: Transformer, how: Configuration) -> float:
    """Return the bytes of these results on a device, for a microbatch."""
    routed = model.active * how.load if model.experts else 0.0
    widths = {
        "query": model.queries,
        "key": model.keys,
        "value": model.keys_and_values - model.keys,
        "context": model.values,
        "out": float(model.hidden),
        "mlpwi": (model.expert * routed + model.shared_ffn if model.experts else model.ffn) * model.gates,
        "mlpwo": model.hidden * routed,
    }
    return 2.0 * how.tokens * sum(widths.get(name, 0.0) for name in how.saved) / how.tp
