"""A transformer as sizes."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

from multimesh.core import checks
from multimesh.errors import UsageError


@dataclass(frozen=True)
class Transformer:
    """The sizes of a transformer that predicts the next token."""

    name: str  # for tables
    layers: int
    hidden: int
    ffn: int  # width of a dense MLP, and of an expert where `expert_ffn` is 0
    heads: int
    kv_heads: int
    vocabulary: int
    head: int = 0  # elements of a head of queries and keys; 0: ``hidden / heads``
    gated: bool = True  # whether the MLP has a gate, so three matrices in place of two
    # experts of a layer, and how many of them a token passes; 0: the MLP is dense
    experts: int = 0
    active: int = 0
    tied: bool = False  # whether the head is the embedding transposed
    # width of an expert, and of the experts that every token passes, together
    expert_ffn: int = 0
    shared_ffn: int = 0
    dense_layers: int = 0  # layers at the start that have a dense MLP though the others have experts
    value_head: int = 0  # elements of a head of values; 0: as `head`
    # of multi-head latent attention: widths of the compressed queries (0: not compressed) and of the compressed keys
    # and values (0: another attention), and the elements of a head that carry the position
    query_rank: int = 0
    kv_rank: int = 0
    rope_head: int = 0
    # tokens that a layer of local attention sees, and the share of the layers that are local
    window: int = 0
    windowed: float = 0.0
    predicted: int = 0  # further tokens that are predicted, each by a layer and a head of its own (MTP)

    def __post_init__(self) -> None:
        """Check the sizes."""
        for name in ("layers", "hidden", "ffn", "heads", "kv_heads", "vocabulary"):
            checks.integer(f"model {self.name}: {name}", getattr(self, name), 1)
        for name in ("expert_ffn", "shared_ffn", "dense_layers", "query_rank", "kv_rank", "rope_head", "predicted"):
            checks.integer(f"model {self.name}: {name}", getattr(self, name), 0)
        if self.heads % self.kv_heads:
            raise UsageError(f"model {self.name}: heads {self.heads} must be a multiple of kv_heads {self.kv_heads}")
        if bool(self.experts) != bool(self.active) or self.active > self.experts:
            raise UsageError(f"model {self.name}: active {self.active} of {self.experts} experts is no choice of them")
        if self.dense_layers > self.layers or not 0 <= self.windowed <= 1:
            raise UsageError(f"model {self.name}: dense_layers and windowed are parts of its {self.layers} layers")

    @functools.cached_property
    def head_size(self) -> float:
        """Elements of a head of queries and keys."""
        return self.head or self.hidden / self.heads

    @functools.cached_property
    def queries(self) -> float:
        """Width of all heads of queries."""
        return self.heads * self.head_size

    @functools.cached_property
    def values(self) -> float:
        """Width of the result of attention: of all heads of values."""
        return self.heads * (self.value_head or self.head_size)

    @property
    def keys(self) -> float:
        """Width of all heads of keys."""
        return self.kv_heads * self.head_size

    @functools.cached_property
    def keys_and_values(self) -> float:
        """Width of all heads of keys and of values together."""
        return self.kv_heads * (self.head_size + (self.value_head or self.head_size))

    @property
    def gates(self) -> int:
        """Matrices that enter an MLP."""
        return 2 if self.gated else 1

    @property
    def expert(self) -> int:
        """Width of an expert."""
        return self.expert_ffn or self.ffn

    @functools.cached_property
    def dense(self) -> Transformer:
        """The same with a dense MLP in every layer."""
        return dataclasses.replace(self, experts=0, active=0, shared_ffn=0, dense_layers=0)

    def mean_keys(self, sequence: float) -> float:
        """Return the mean number of keys to which a token attends, times two, over tokens and layers."""
        local = min(float(sequence), 2.0 * self.window) if self.window else float(sequence)
        return self.windowed * local + (1 - self.windowed) * sequence

    @functools.cached_property
    def projections(self) -> tuple[tuple[float, float], ...]:
        """Rows and columns of the matrices of attention; the last is that of its result."""
        entering: tuple[tuple[float, float], ...] = ((self.hidden, self.queries + self.keys_and_values),)
        if self.kv_rank:
            plain, ranks = self.heads * (self.head_size - self.rope_head), self.kv_rank + self.rope_head
            entering = ((self.hidden, self.queries),)
            if self.query_rank:
                entering = (self.hidden, self.query_rank), (self.query_rank, self.queries)
            entering = (*entering, (self.hidden, ranks), (self.kv_rank, plain + self.values))
        return *entering, (self.values, self.hidden)

    def mlp_width(self, load: float) -> float:
        """Return the width of the MLPs that a token passes; of routed experts ``load`` times as many as on average."""
        return self.expert * self.active * load + self.shared_ffn if self.experts else float(self.ffn)

    @functools.cached_property
    def layer_parameters(self) -> tuple[float, float, float]:
        """Parameters of a layer with a dense MLP; of one with experts, but for the routed ones; and of these."""
        attention = sum(float(rows * columns) for rows, columns in self.projections)
        dense = attention + self.hidden * self.ffn * (self.gates + 1)
        shared = self.hidden * (self.shared_ffn * (self.gates + 1) + self.experts)  # with the router
        return dense, attention + shared, float(self.experts * self.hidden * self.expert * (self.gates + 1))

    def split_parameters(self, tp: int, ep: int, *, dense: float = 0.0, sparse: float) -> tuple[float, float]:
        """Return the parameters of a device in so many layers with a dense MLP and with experts.

        Those of routed experts, which ``ep`` devices share, are apart; ``tp`` devices share the others. All layers are
        dense where the model has no experts.
        """
        one, always, routed = self.layer_parameters
        if not self.experts:
            return (dense + sparse) * one / tp, 0.0
        return (dense * one + sparse * always) / tp, sparse * routed / ep

    @property
    def embedding_parameters(self) -> float:
        """Parameters of the embedding, or of the head."""
        return float(self.hidden * self.vocabulary)

    def count_parameters(self, share: float) -> float:
        """Return the parameters of all layers, with a share of the routed experts."""
        dense, (one, always, routed) = self.dense_layers if self.experts else self.layers, self.layer_parameters
        return dense * one + (self.layers - dense) * (always + routed * share)

    @property
    def parameters(self) -> float:
        """Parameters of all layers, the embedding and the head, without those that predict further tokens."""
        return self.count_parameters(1.0) + self.embedding_parameters * (1 if self.tied else 2)

    @functools.cached_property
    def active_parameters(self) -> float:
        """Parameters that a token passes, without the embedding."""
        return self.count_parameters(self.active / max(1, self.experts)) + self.embedding_parameters

    def operations(self, sequence: int) -> float:
        """Return the operations of a token in a training step without recomputation. Causal attention counts half."""
        scores = 3.0 * self.layers * (self.queries + self.values) * self.mean_keys(sequence)
        return 6.0 * self.active_parameters + scores
