"""Declarations only: importing them needs no engine and no torch."""
