"""Reference numerics: differentiable, fp32 inside, each row independent of its neighbours. Imports torch."""
