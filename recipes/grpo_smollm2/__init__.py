"""GRPO on SmolLM2-135M-Instruct: megatron-core trains, vLLM samples, both in one process."""

import os

# Before torch is loaded, which is when OpenMP reads it. Threads that spin while they wait make a step several times
# slower as soon as one core is busy with something else: 23 s of processor time for a forward and backward, not 6.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
