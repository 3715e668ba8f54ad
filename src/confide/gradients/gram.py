"""Norms of Σ_s g_s a_sᵀ from inner products of tokens, with a proven bound on the rounding error."""

from __future__ import annotations

import torch
from torch import Tensor

# A unit whose bound exceeds this share of its squared norm is measured again in float64.
_TOLERANCE = 2.0**-7


def squared_norms(a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """‖Σ_s g_s a_sᵀ‖² per first index, and how far the true value may lie above.

    Args:
        a: (n, S, p).
        g: (n, S, d), same dtype.

    Returns:
        squares: (n,) float64; non-finite where a or g is.
        slack: (n,) float64.
    """
    if a.shape[1] == 1:
        squares = _squares(a[:, 0]) * _squares(g[:, 0])
        return squares, torch.zeros_like(squares)
    squares, slack = _gram(a, g)
    if a.dtype != torch.float64:
        # Underflow is outside the bound's model, hence the floor; NaN compares false.
        sure = (slack <= _TOLERANCE * squares) & (squares > 1e-24) & slack.isfinite()
        again = (~sure).nonzero()[:, 0]
        if len(again):
            squares[again], slack[again] = _gram(a[again].double(), g[again].double())
    return squares, slack


def _squares(x: Tensor) -> Tensor:
    return x.to(torch.float64).square().sum(-1)


def _gram(a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Gram form with its forward error bound.

    An inner product of length n computed in any order errs by at most γ_n‖x‖‖y‖, γ_n = nu/(1 − nu)
    (Higham 2002, section 3.1), so with α_s = ‖a_s‖, β_s = ‖g_s‖, A = aaᵀ, G = ggᵀ the sum errs by at most
    γ_p Σ α_s α_t|G_st| + γ_d Σ β_s β_t|A_st| + γ_p γ_d (Σ α_s β_s)², and each product by one rounding more.
    """
    A, G = a @ a.mT, g @ g.mT
    alpha, beta = _lengths(A), _lengths(G)
    squares = (A * G).sum((1, 2), dtype=torch.float64)
    gamma_a, gamma_g = _gamma(a.shape[-1] + 4, a.dtype), _gamma(g.shape[-1] + 4, a.dtype)
    first = gamma_a * _form(G.abs_(), alpha) + gamma_g * _form(A.abs_(), beta)
    second = 4 * gamma_a * gamma_g * (alpha * beta).sum(1).to(torch.float64).square()
    # The bound itself is computed with rounding.
    return squares, (first + second) * (1 + 1e-3)


def _lengths(gram: Tensor) -> Tensor:
    return gram.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt()


def _form(matrix: Tensor, x: Tensor) -> Tensor:
    """xᵀ·matrix·x per first index, float64."""
    return ((matrix @ x[:, :, None])[:, :, 0] * x).sum(1, dtype=torch.float64)


def _gamma(n: int, dtype: torch.dtype) -> float:
    unit = torch.finfo(dtype).eps / 2
    return n * unit / (1 - n * unit)
