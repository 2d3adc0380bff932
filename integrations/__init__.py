"""The engines, one folder each: ``mismatch_hooks.integrations.vllm`` and ``mismatch_hooks.integrations.megatron``."""

if __name__ == "integrations":
    raise ImportError("import mismatch_hooks.integrations, not integrations: one file must not be two modules")
