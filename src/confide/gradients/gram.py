"""Norms of Σ_s g_s a_sᵀ from inner products of tokens, with a proven bound on the rounding error."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# A unit whose bound exceeds this share of its squared norm is measured again in float64.
_TOLERANCE = 2.0**-7


@dataclass(frozen=True)
class Gram:
    """Inner products of tokens.

    Attributes:
        tokens: (n, S, p).
        products: (n, S, S).
        lengths: (n, S), token norms, a trifle more.
        error: γ, so that a product of tokens s and t errs by at most γ·lengths_s·lengths_t.
    """

    tokens: Tensor
    products: Tensor
    lengths: Tensor
    error: float

    @classmethod
    def of(cls, tokens: Tensor) -> Gram:
        """Inner products of `tokens` (n, S, p) in their own dtype."""
        products = tokens @ tokens.mT
        number = torch.finfo(tokens.dtype)
        unit = number.eps / 2
        # The floor makes γ·lengths_s·lengths_t cover underflow too, at most `tiny` per term.
        floor = 2 * number.tiny / unit
        lengths = (products.diagonal(dim1=1, dim2=2).clamp(min=0) + floor).sqrt()
        # Four roundings more: the lengths' own, and that of multiplying two products.
        terms = tokens.shape[-1] + 4
        return cls(tokens, products, lengths, terms * unit / (1 - terms * unit))


def squared_norms(a: Gram, g: Gram) -> tuple[Tensor, Tensor]:
    """‖Σ_s g_s a_sᵀ‖² per first index, and how far the true value may lie above.

    Returns:
        squares: (n,) float64; non-finite where a or g is.
        slack: (n,) float64.
    """
    squares, slack = _with_bound(a, g)
    if a.tokens.dtype != torch.float64:
        # NaN compares false. A γ too large for the bound's own rounding makes this false as well.
        sure = (slack <= _TOLERANCE * squares) & slack.isfinite()
        again = (~sure).nonzero()[:, 0]
        if len(again):
            exact = _with_bound(Gram.of(a.tokens[again].double()), Gram.of(g.tokens[again].double()))
            squares[again], slack[again] = exact
    return squares, slack


def _with_bound(a: Gram, g: Gram) -> tuple[Tensor, Tensor]:
    """Gram form with its forward error bound.

    An inner product of length n computed in any order errs by at most γ_n‖x‖‖y‖, γ_n = nu/(1 − nu)
    (Higham 2002, section 3.1), so with α_s = ‖a_s‖, β_s = ‖g_s‖, A = aaᵀ, G = ggᵀ the sum Σ A_st G_st errs
    by at most γ_p Σ α_s α_t|G_st| + γ_d Σ β_s β_t|A_st| + γ_p γ_d (Σ α_s β_s)².
    """
    squares = (a.products * g.products).sum((1, 2), dtype=torch.float64)
    first = a.error * _form(g.products, a.lengths) + g.error * _form(a.products, g.lengths)
    second = 4 * a.error * g.error * (a.lengths * g.lengths).sum(1).to(torch.float64).square()
    second += a.products[0].numel() * torch.finfo(a.products.dtype).tiny
    # The bound itself is computed with rounding, from rounded lengths.
    return squares, (first + second) * (1 + 1e-2)


def _form(products: Tensor, x: Tensor) -> Tensor:
    """xᵀ|products|x per first index, float64."""
    return products.abs().mul_(x[:, None, :]).sum(2).mul_(x).sum(1, dtype=torch.float64)
