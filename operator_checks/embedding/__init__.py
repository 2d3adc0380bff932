"""Checks of the embedding lookup, where a token id becomes the first hidden state."""
