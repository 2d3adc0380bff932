"""GRPO on SmolLM2-135M-Instruct: megatron-core trains, vLLM samples, both in one process."""
