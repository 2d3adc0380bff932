"""How the trainer runs a log-prob forward: micro-batch, mode, matmul precision, and what needs a new model."""
