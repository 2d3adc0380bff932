"""megatron-core as the training side; written against 0.16.1, which is imported only where it is used."""

from mismatch_hooks.integrations.megatron.backend import MegatronBackend, ScoringTimeout
from mismatch_hooks.integrations.megatron.live_model import UnsupportedTrainerError
from mismatch_hooks.integrations.megatron.logprobs import token_logprobs

__all__ = ["MegatronBackend", "ScoringTimeout", "UnsupportedTrainerError", "token_logprobs"]
