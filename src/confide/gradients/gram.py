"""Norms of Σ_s g_s a_sᵀ from inner products of tokens, with a proven bound on the rounding error."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# A unit whose bound exceeds this share of its squared norm is measured again in float64.
_TOLERANCE = 2.0**-7

_PIECE = 1024  # of longer tokens, so many entries are multiplied at a time, and the pieces added in float64

_LONG = 64  # positions from which two products of half the rows cost less than one of all


@dataclass(frozen=True)
class Mixed:
    """Tokens of two kinds, one after the other: `dense` (n, S, d), and unit vectors e(`ids`), ids (n, T).

    The output gradients of a head and the ids of an embedding that share one table of d rows.
    """

    dense: Tensor
    ids: Tensor

    def double(self) -> Mixed:
        """The same in float64."""
        return Mixed(self.dense.double(), self.ids)

    def __getitem__(self, index: Tensor) -> Mixed:
        return Mixed(self.dense[index], self.ids[index])

    @property
    def dtype(self) -> torch.dtype:
        """Of the dense part."""
        return self.dense.dtype

    @property
    def shape(self) -> tuple[int, int, int]:
        """(n, S + T, d)."""
        n, length, d = self.dense.shape
        return n, length + self.ids.shape[1], d

    def products(self) -> Tensor:
        """(n, S + T, S + T) inner products: e(i)·e(j) is 1 where i = j, e(i)·x is x_i."""
        across = self.dense.gather(2, self.ids[:, None].expand(-1, self.dense.shape[1], -1))
        equal = (self.ids[:, :, None] == self.ids[:, None]).to(self.dense.dtype)
        top = torch.cat([_inner(self.dense), across], 2)
        return torch.cat([top, torch.cat([across.mT, equal], 2)], 1)


@dataclass(frozen=True)
class Gram:
    """Inner products of tokens.

    Attributes:
        tokens: (n, S, p), dense or partly unit vectors.
        products: (n, S, S).
        lengths: (n, S), token norms, a trifle more.
        error: γ, so that a product of tokens s and t errs by at most γ·lengths_s·lengths_t, in sums too.
    """

    tokens: Tensor | Mixed
    products: Tensor
    lengths: Tensor
    error: float

    @classmethod
    def of(cls, tokens: Tensor | Mixed) -> Gram:
        """Inner products of `tokens` (n, S, p) in their own dtype."""
        products = tokens.products() if isinstance(tokens, Mixed) else _inner(tokens)
        number = torch.finfo(tokens.dtype)
        # The floor makes γ·lengths_s·lengths_t cover underflow too, at most `tiny` per term.
        floor = 4 * number.tiny / number.eps
        lengths = (products.diagonal(dim1=1, dim2=2).clamp(min=0) + floor).sqrt()
        # Roundings: of the product, of its sum with S − 1 others, and of the lengths. With pieces, by
        # Cauchy-Schwarz Σ γ‖x_i‖‖y_i‖ ≤ γ‖x‖‖y‖ for the γ of one piece; their sum is rounded once.
        _, length, p = tokens.shape
        return cls(tokens, products, lengths, _gamma(length + min(p, 2 * _PIECE) + 5, tokens.dtype))

    def expand(self, count: int) -> Gram:
        """The same for `count` first indices, where it is of one."""
        if len(self.products) == count or not isinstance(self.tokens, Tensor):
            return self
        tokens, products = (x.expand(count, -1, -1) for x in (self.tokens, self.products))
        return Gram(tokens, products, self.lengths.expand(count, -1), self.error)


def _inner(x: Tensor) -> Tensor:
    """(n, S, p) → (n, S, S)."""
    if x.shape[2] <= 2 * _PIECE or x.dtype == torch.float64:
        return _square(x)
    total = x.new_zeros((len(x), x.shape[1], x.shape[1]), dtype=torch.float64)
    for piece in torch.split(x, _PIECE, 2):
        total += _square(piece)
    return total.to(x.dtype)


def _square(x: Tensor) -> Tensor:
    """x xᵀ; of long rows a quarter is not computed, but mirrored."""
    length = x.shape[1]
    if length < _LONG:
        return x @ x.mT
    half = length // 2
    products = x.new_empty((len(x), length, length))
    products[:, :half, :half] = x[:, :half] @ x[:, :half].mT
    products[:, half:] = x[:, half:] @ x.mT
    products[:, :half, half:] = products[:, half:, :half].mT
    return products


def squared_norms(a: Gram, g: Gram) -> tuple[Tensor, Tensor]:
    """‖Σ_s g_s a_sᵀ‖² per first index, and how far above it what the sum really adds may lie.

    The slack covers the rounding of the Gram form and that of the sum itself: tokens that nearly cancel
    leave a small gradient, but adding them in floating point leaves an error of up to γ_S Σ‖a_s‖‖g_s‖.

    Returns:
        squares: (n,) float64; non-finite where a or g is, or nearly overflows.
        slack: (n,) float64.
    """
    dtype = a.tokens.dtype
    squares, slack, reach = _with_bound(a, g)
    if dtype != torch.float64:
        # NaN compares false. A γ too large for the bound's own rounding makes this false as well.
        sure = (slack <= _TOLERANCE * squares) & slack.isfinite()
        again = (~sure).nonzero()[:, 0]
        if len(again):
            exact = Gram.of(a.tokens[again].double()), Gram.of(g.tokens[again].double())
            squares[again], slack[again], reach[again] = _with_bound(*exact)
            for gram in exact:
                squares[again[(gram.lengths > overflow(dtype)).any(1)]] = torch.inf
    error = _gamma(a.tokens.shape[1] + 2, dtype) * reach
    return squares, slack + 2 * (squares.clamp(min=0) + slack).sqrt() * error + error.square()


def overflow(dtype: torch.dtype) -> float:
    """Length of a token beyond which it is treated as infinite: scaling it could overflow."""
    return torch.finfo(dtype).max * 2.0**-20


def _with_bound(a: Gram, g: Gram) -> tuple[Tensor, Tensor, Tensor]:
    """Gram form, its forward error bound, and Σ_s ‖a_s‖‖g_s‖; (n,) float64 each.

    An inner product of length n computed in any order errs by at most γ_n‖x‖‖y‖ (Higham 2002, section
    3.1), so with α_s = ‖a_s‖, β_s = ‖g_s‖, A = aaᵀ, G = ggᵀ the sum Σ A_st G_st errs by at most
    γ_p Σ α_s α_t|G_st| + γ_d Σ β_s β_t|A_st| + γ_p γ_d (Σ α_s β_s)².
    """
    squares = (a.products * g.products).sum(2).sum(1, dtype=torch.float64)
    reach = (a.lengths * g.lengths).sum(1, dtype=torch.float64)
    first = a.error * _form(g.products, a.lengths) + g.error * _form(a.products, g.lengths)
    second = 4 * a.error * g.error * reach.square()
    second += a.products[0].numel() * torch.finfo(a.products.dtype).tiny
    # The bound itself is computed with rounding, from rounded lengths.
    return squares, (first + second) * (1 + 1e-2), reach * (1 + 1e-2)


def _gamma(n: int, dtype: torch.dtype) -> float:
    """γ_n = nu / (1 − nu), the error of n roundings."""
    unit = torch.finfo(dtype).eps / 2
    return n * unit / (1 - n * unit)


def _form(products: Tensor, x: Tensor) -> Tensor:
    """xᵀ|products|x per first index, float64."""
    return products.abs().mul_(x[:, None, :]).sum(2).mul_(x).sum(1, dtype=torch.float64)
