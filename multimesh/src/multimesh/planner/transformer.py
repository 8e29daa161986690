"""A transformer as sizes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from multimesh.core import checks
from multimesh.errors import UsageError


@dataclass(frozen=True)
class Transformer:
    """The sizes of a transformer that predicts the next token.

    Attributes
    ----------
    name
        For tables.
    layers, hidden, ffn, heads, kv_heads, vocabulary
        Its sizes; ``ffn`` is the width of a dense MLP, and of an expert where ``expert_ffn`` is 0.
    head
        Elements of a head of queries and keys; 0: ``hidden / heads``.
    value_head
        Elements of a head of values; 0: as ``head``.
    gated
        Whether the MLP has a gate, so three matrices in place of two.
    experts, active
        Experts of a layer, and how many of them a token passes; 0: the MLP is dense.
    expert_ffn, shared_ffn
        Width of an expert, and of the experts that every token passes, together.
    dense_layers
        Layers at the start that have a dense MLP though the others have experts.
    query_rank, kv_rank, rope_head
        Of multi-head latent attention: widths of the compressed queries (0: not compressed) and of the compressed keys
        and values, and the elements of a head that carry the position. ``kv_rank`` 0: another attention.
    window, windowed
        Tokens that a layer of local attention sees, and the share of the layers that are local.
    predicted
        Further tokens that are predicted, each by a layer and a head of its own (MTP).
    tied
        Whether the head is the embedding transposed.
    biased
        Whether experts have biases, and limits of what enters their activation.
    """

    name: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocabulary: int
    head: int = 0
    gated: bool = True
    experts: int = 0
    active: int = 0
    tied: bool = False
    expert_ffn: int = 0
    shared_ffn: int = 0
    dense_layers: int = 0
    value_head: int = 0
    query_rank: int = 0
    kv_rank: int = 0
    rope_head: int = 0
    window: int = 0
    windowed: float = 0.0
    predicted: int = 0
    biased: bool = False

    def __post_init__(self) -> None:
        """Check the sizes."""
        for name in ("layers", "hidden", "ffn", "heads", "kv_heads", "vocabulary"):
            checks.whole(f"model {self.name}: {name}", getattr(self, name), 1)
        for name in ("expert_ffn", "shared_ffn", "dense_layers", "query_rank", "kv_rank", "rope_head", "predicted"):
            checks.whole(f"model {self.name}: {name}", getattr(self, name), 0)
        if self.heads % self.kv_heads:
            raise UsageError(f"model {self.name}: heads {self.heads} must be a multiple of kv_heads {self.kv_heads}")
        if bool(self.experts) != bool(self.active) or self.active > self.experts:
            raise UsageError(f"model {self.name}: active {self.active} of {self.experts} experts is no choice of them")
        if self.dense_layers > self.layers or not 0 <= self.windowed <= 1:
            raise UsageError(f"model {self.name}: dense_layers and windowed are parts of its {self.layers} layers")

    @property
    def head_size(self) -> float:
        """Elements of a head of queries and keys."""
        return self.head or self.hidden / self.heads

    @property
    def queries(self) -> float:
        """Width of all heads of queries."""
        return self.heads * self.head_size

    @property
    def values(self) -> float:
        """Width of the result of attention: of all heads of values."""
        return self.heads * (self.value_head or self.head_size)

    @property
    def keys(self) -> float:
        """Width of all heads of keys."""
        return self.kv_heads * self.head_size

    @property
    def keys_and_values(self) -> float:
        """Width of all heads of keys and of values together."""
        return self.kv_heads * (self.head_size + (self.value_head or self.head_size))

    @property
    def up(self) -> int:
        """Width of the products that enter a dense MLP: of gate and up together."""
        return self.ffn * self.gates

    @property
    def gates(self) -> int:
        """Matrices that enter an MLP."""
        return 2 if self.gated else 1

    @property
    def expert(self) -> int:
        """Width of an expert."""
        return self.expert_ffn or self.ffn

    @property
    def dense(self) -> Transformer:
        """The same with a dense MLP in every layer."""
        return dataclasses.replace(self, experts=0, active=0, shared_ffn=0, dense_layers=0)

    def seen(self, sequence: float) -> float:
        """Return the mean number of keys to which a token attends, times two, over tokens and layers."""
        local = min(float(sequence), 2.0 * self.window) if self.window else float(sequence)
        return self.windowed * local + (1 - self.windowed) * sequence

    @property
    def projections(self) -> tuple[tuple[float, float, bool], ...]:
        """Matrices of attention: rows, columns, and whether tensor parallelism shards the columns (else the rows)."""
        if not self.kv_rank:
            entering = self.queries + self.keys_and_values
            return (self.hidden, entering, True), (self.values, self.hidden, False)
        plain = self.heads * (self.head_size - self.rope_head)
        if self.query_rank:
            first: tuple[float, float, bool] = (self.hidden, self.query_rank, True)
            queries: tuple[tuple[float, float, bool], ...] = (first, (self.query_rank, self.queries, True))
        else:
            queries = ((self.hidden, self.queries, True),)
        return (
            *queries,
            (self.hidden, self.kv_rank + self.rope_head, True),
            (self.kv_rank, plain + self.values, True),
            (self.values, self.hidden, False),
        )

    @property
    def expansions(self) -> tuple[tuple[float, float], ...]:
        """Rows and columns of the matrices that make heads of the compressed queries, keys and values."""
        if not self.kv_rank:
            return ()
        ranks = (self.query_rank, self.kv_rank)
        return tuple((rows, columns) for rows, columns, _ in self.projections if rows in ranks)

    def mlp_width(self, load: float) -> float:
        """Return the width of the MLPs that a token passes; of routed experts ``load`` times as many as on average."""
        return self.expert * self.active * load + self.shared_ffn if self.experts else float(self.ffn)

    @property
    def attention_parameters(self) -> float:
        """Parameters of a layer's attention."""
        return sum(float(rows * columns) for rows, columns, _ in self.projections)

    @property
    def expert_parameters(self) -> float:
        """Parameters of all routed experts of a layer."""
        return float(self.experts * self.hidden * self.expert * (self.gates + 1))

    @property
    def always_parameters(self) -> float:
        """Parameters of a layer with experts, without the routed ones: attention, shared experts and the router."""
        shared = self.hidden * (self.shared_ffn * (self.gates + 1) + self.experts)
        return self.attention_parameters + shared

    @property
    def dense_layer_parameters(self) -> float:
        """Parameters of a layer with a dense MLP."""
        return self.attention_parameters + self.hidden * self.ffn * (self.gates + 1)

    def held_parameters(self, ep: int) -> float:
        """Return the parameters of a layer on one of ``ep`` devices that share its experts."""
        if not self.experts:
            return self.dense_layer_parameters
        return self.always_parameters + self.expert_parameters / ep

    @property
    def layer_parameters(self) -> float:
        """Parameters of a layer, with all its experts."""
        return self.held_parameters(1)

    @property
    def embedding_parameters(self) -> float:
        """Parameters of the embedding, or of the head."""
        return float(self.hidden * self.vocabulary)

    @property
    def parameters(self) -> float:
        """Parameters of all layers, the embedding and the head, without those that predict further tokens."""
        dense = self.dense_layers if self.experts else self.layers
        layers = dense * self.dense_layer_parameters + (self.layers - dense) * self.layer_parameters
        return layers + self.embedding_parameters * (1 if self.tied else 2)

    @property
    def active_parameters(self) -> float:
        """Parameters that a token passes, without the embedding."""
        used = self.always_parameters + self.expert_parameters * self.active / max(1, self.experts)
        dense = self.dense_layers if self.experts else self.layers
        return dense * self.dense_layer_parameters + (self.layers - dense) * used + self.embedding_parameters

    def operations(self, sequence: int) -> float:
        """Return the operations of a token in a training step without recomputation. Causal attention counts half."""
        scores = 3.0 * self.layers * (self.queries + self.values) * self.seen(sequence)
        return 6.0 * self.active_parameters + scores
