"""Checks of the gated activation between the two products of the MLP."""
