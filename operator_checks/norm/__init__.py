"""Checks of the RMS norms: those of the residual stream, and those of queries and keys."""
