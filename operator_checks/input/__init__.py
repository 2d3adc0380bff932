"""What goes into both models besides the tokens: who sees whom, and where each token stands."""
