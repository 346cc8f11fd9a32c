"""A decoder model in plain torch: grouped-query attention, rotary embedding, sampling; and the caches it can use.

Every step takes one token of each sequence. Keys and values live in one cache a layer, a row for each token of whatever
sequence; a table says which rows are whose. So a cache need only have as many rows as there are tokens, and a captured
step stays right while it grows. Nothing in this file knows of remap but `ElasticCache`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

PAGE = 16
"""Rows are given out in pages of this many tokens."""

Around: TypeAlias = Callable[..., AbstractContextManager[None]]
"""Makes a context of the modules that are used inside of it."""

LIKELIEST = 40
"""A token is chosen among so many."""


@dataclass(frozen=True)
class Shape:
    """How large a model is."""

    layers: int = 2
    width: int = 64
    heads: int = 4
    kv_heads: int = 2
    inner: int = 128
    vocabulary: int = 256
    longest: int = 256

    @property
    def head(self) -> int:
        """The elements of one head."""
        return self.width // self.heads


class Block(nn.Module):
    """One layer: attention over what its cache holds of each sequence, and a gated feed-forward."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        both = shape.heads + 2 * shape.kv_heads
        self.before = nn.RMSNorm(shape.width)
        self.project = nn.Linear(shape.width, both * shape.head, bias=False)
        self.out = nn.Linear(shape.heads * shape.head, shape.width, bias=False)
        self.after = nn.RMSNorm(shape.width)
        self.gate = nn.Linear(shape.width, 2 * shape.inner, bias=False)
        self.down = nn.Linear(shape.inner, shape.width, bias=False)

    def forward(
        self, x: Tensor, turn: tuple[Tensor, Tensor], cache: Tensor, rows: Tensor, place: Tensor
    ) -> Tensor:
        """Return the output for (sequences, width); `rows` are each sequence's, `place` the index of the last."""
        shape, count = self.shape, x.shape[0]
        query, key, value = self.project(self.before(x)).split(
            [shape.heads * shape.head, shape.kv_heads * shape.head, shape.kv_heads * shape.head], dim=-1
        )
        query = rotate(query.view(count, shape.heads, shape.head), turn)
        key = rotate(key.view(count, shape.kv_heads, shape.head), turn)
        new = torch.stack((key, value.view(count, shape.kv_heads, shape.head)), dim=1)
        cache.index_copy_(0, rows.gather(1, place[:, None]).squeeze(1), new)
        known = cache.index_select(0, rows.flatten()).view(count, -1, 2, shape.kv_heads, shape.head)
        seen = torch.arange(rows.shape[1], device=x.device)[None] <= place[:, None]
        # Rows that were never written are undefined, and nothing times a NaN is a NaN.
        known = known.where(seen[:, :, None, None, None], 0)
        keys, values = known[:, :, 0].transpose(1, 2), known[:, :, 1].transpose(1, 2)
        # The fused kernels that torch takes for this on a GPU do not give the same bits each time.
        with sdpa_kernel(SDPBackend.MATH):
            mixed = functional.scaled_dot_product_attention(
                query[:, :, None], keys, values, attn_mask=seen[:, None, None], enable_gqa=True
            )
        x = x + self.out(mixed.reshape(count, -1))
        gate, up = self.gate(self.after(x)).chunk(2, dim=-1)
        return x + self.down(functional.silu(gate) * up)


class Rotary(nn.Module):
    """The angles by which a position turns each pair of a head's elements."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.register_buffer("cos", torch.empty(shape.longest, shape.head // 2))
        self.register_buffer("sin", torch.empty(shape.longest, shape.head // 2))

    def initialize(self) -> None:
        """Work the angles out."""
        angle = 10_000 ** (-torch.arange(0, self.shape.head, 2) / self.shape.head)
        angles = torch.outer(torch.arange(self.shape.longest), angle)
        self.cos.copy_(angles.cos())
        self.sin.copy_(angles.sin())

    def forward(self, places: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosines and sines for positions, one for all heads."""
        return self.cos[places][:, None].to(dtype), self.sin[places][:, None].to(dtype)


class Decoder(nn.Module):
    """A decoder-only model with random weights; the embedding is also the output layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.rotary = Rotary(shape)

    @property
    def parts(self) -> list[nn.Module]:
        """The modules in the order in which a step needs them."""
        return [self.rotary, self.embedding, *self.blocks, self.norm]

    def forward(
        self, tokens: Tensor, places: Tensor, rows: Tensor, caches: list[Tensor], around: Around | None = None
    ) -> Tensor:
        """Return the logits that follow one token of each sequence; each part is worked out inside `around(…)`."""
        around = around or (lambda *_modules: nullcontext())
        with around(self.rotary, self.embedding):
            x = self.embedding(tokens)
            turn = self.rotary(places, x.dtype)
        for block, cache in zip(self.blocks, caches, strict=True):
            with around(block):
                x = block(x, turn, cache, rows, places)
        with around(self.norm):
            return functional.linear(self.norm(x), self.embedding.weight)

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Set random weights, the same ones for a seed on one kind of device."""
        self.rotary.initialize()
        generator = torch.Generator(self.embedding.weight.device).manual_seed(seed)
        for name, weight in self.named_parameters():
            if "norm" in name or "before" in name or "after" in name:
                weight.fill_(1)
                continue
            weight.normal_(std=weight.shape[-1] ** -0.5, generator=generator)


def rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair of elements by its position's angle."""
    cos, sin = turn
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


def sample(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    """Choose the next token among the likeliest."""
    best, which = logits.float().topk(LIKELIEST)
    chosen = torch.multinomial((best / temperature).softmax(-1), 1, generator=generator)
    return int(which[chosen])


class Cache(Protocol):
    """Rows for keys and values, in every layer."""

    tensors: list[Tensor]

    def grow(self, rows: int) -> None:
        """Have so many rows in each layer."""
        ...


class PlainCache:
    """A cache that has all its rows from the beginning: what `ElasticCache` is measured and checked against."""

    def __init__(self, shape: Shape, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        row = (2, shape.kv_heads, shape.head)
        self.tensors = [torch.zeros(rows, *row, dtype=dtype, device=device) for _ in range(shape.layers)]

    def grow(self, rows: int) -> None:
        """Do nothing: the rows are there."""


class ElasticCache:
    """A cache of `remap.torch.ElasticTensor`s: it has the rows that are needed, at addresses that stay."""

    def __init__(self, shape: Shape, rows: int, dtype: torch.dtype, ahead: int) -> None:
        import remap

        row = (2, shape.kv_heads, shape.head)
        self.layers = [
            remap.torch.ElasticTensor(rows, *row, dtype=dtype, device=0, chunk="2MiB", ahead=ahead)
            for _ in range(shape.layers)
        ]
        self.tensors = [layer.whole for layer in self.layers]
        self.bytes = sum(layer.row_bytes for layer in self.layers)
        self.rows = 0

    def grow(self, rows: int) -> None:
        """Map what is missing, or give back what is not needed; nothing is copied."""
        for layer in self.layers:
            layer.resize(rows)
        self.rows = rows

    def close(self) -> None:
        """Give everything back."""
        self.tensors = []
        for layer in self.layers:
            layer.close()
