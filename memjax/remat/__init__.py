"""Rematerialisation: keep little between forward and backward, recompute the rest."""
