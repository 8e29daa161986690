"""A transformer as sizes."""

from __future__ import annotations

from dataclasses import dataclass

from multimesh.core import checks
from multimesh.errors import UsageError


@dataclass(frozen=True)
class Transformer:
    """A decoder of equal layers.

    Attributes
    ----------
    name
        For tables.
    layers, hidden, ffn, heads, kv_heads, vocabulary
        Its sizes.
    head
        Elements of a head of attention; 0: ``hidden / heads``.
    gated
        Whether the MLP has a gate, so three matrices in place of two.
    experts, active
        Experts of a layer, and how many of them a token passes; 0: the MLP is dense.
    tied
        Whether the head is the embedding transposed.
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

    def __post_init__(self) -> None:
        """Check the sizes."""
        for name in ("layers", "hidden", "ffn", "heads", "kv_heads", "vocabulary"):
            checks.whole(f"model {self.name}: {name}", getattr(self, name), 1)
        if self.heads % self.kv_heads:
            raise UsageError(f"model {self.name}: heads {self.heads} must be a multiple of kv_heads {self.kv_heads}")
        if bool(self.experts) != bool(self.active) or self.active > self.experts:
            raise UsageError(f"model {self.name}: active {self.active} of {self.experts} experts is no choice of them")

    @property
    def head_size(self) -> float:
        """Elements of a head of attention."""
        return self.head or self.hidden / self.heads

    @property
    def queries(self) -> float:
        """Width of all heads."""
        return self.heads * self.head_size

    @property
    def keys(self) -> float:
        """Width of all heads of keys, and of values."""
        return self.kv_heads * self.head_size

    @property
    def up(self) -> int:
        """Width of the products that enter the MLP: of gate and up together."""
        return self.ffn * (2 if self.gated else 1)

    @property
    def attention_parameters(self) -> float:
        """Of a layer."""
        return self.hidden * (2 * self.queries + 2 * self.keys)

    @property
    def mlp_parameters(self) -> float:
        """Of a layer, with all experts."""
        return self.hidden * (self.up + self.ffn) * max(1, self.experts)

    def held_parameters(self, ep: int) -> float:
        """Of a layer, with the experts of one of ``ep`` devices that share them."""
        return self.attention_parameters + self.mlp_parameters / ep

    @property
    def layer_parameters(self) -> float:
        """Of a layer."""
        return self.attention_parameters + self.mlp_parameters

    @property
    def embedding_parameters(self) -> float:
        """Of the embedding, or of the head."""
        return float(self.hidden * self.vocabulary)

    @property
    def parameters(self) -> float:
        """Of all layers, the embedding and the head."""
        return self.layers * self.layer_parameters + self.embedding_parameters * (1 if self.tied else 2)

    def operations(self, sequence: int) -> float:
        """Operations of a token in a training step without recomputation: those of causal attention count half."""
        mlp = self.hidden * (self.up + self.ffn) * max(1, self.active)
        products = self.layers * (self.attention_parameters + mlp) + self.embedding_parameters
        return 6.0 * products + 6.0 * self.layers * self.queries * sequence
