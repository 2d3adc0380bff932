"""Declarations only."""
