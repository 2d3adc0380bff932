"""From the last hidden state to one log-prob: the head, the normaliser, and where values are written back."""
