"""Mixtures of experts, whatever the family: finding their layers, who owns a record, attaching gradients."""
