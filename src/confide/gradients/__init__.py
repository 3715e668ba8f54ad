"""Clipped per-unit gradient sums, Gaussian noise and Poisson draws; knows no model family."""
