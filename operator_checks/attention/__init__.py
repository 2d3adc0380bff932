"""Checks of the attention operator: what happens to queries and keys before, and inside, the attention core."""
