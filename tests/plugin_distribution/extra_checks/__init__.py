"""Operator checks of another distribution."""
