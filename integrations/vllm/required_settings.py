"""What has to be pinned on a vLLM engine for bits to mean something, each with where it is read back."""

from mismatch_hooks.schema.enums import SettingChannel
from mismatch_hooks.schema.environment import RequiredSetting

_ARGUMENT, _VARIABLE = SettingChannel.ENGINE_ARGUMENT, SettingChannel.ENVIRONMENT_VARIABLE
_NCCL = {"parallel.tensor.backend": "nccl"}


def required_settings(longest: int) -> tuple[RequiredSetting, ...]:
    """Return the settings, in the order of the README.

    What is bound, what decodes and what is cached are watched as they happen; these are the settings behind that.

    Args:
        longest: tokens of the longest sequence that is scored, prompt and response; 0 where none is known yet.
    """
    return (
        RequiredSetting(
            key="logprobs_mode",
            readback="rollout.logprobs_mode",
            channel=_ARGUMENT,
            value="raw_logprobs",
            guards="truncated_support",
        ),
        RequiredSetting(
            key="enable_prefix_caching",
            readback="rollout.prefix_caching",
            channel=_ARGUMENT,
            value=False,
            guards="prefix_cache_outlived_weights",
        ),
        RequiredSetting(
            key="enable_chunked_prefill",
            readback="rollout.chunked_prefill",
            channel=_ARGUMENT,
            value=False,
            guards="prefill_was_split",
        ),
        RequiredSetting(
            key="max_num_batched_tokens",
            readback="rollout.max_batched_tokens",
            channel=_ARGUMENT,
            at_least=longest + 1,  # a scoring request samples one token after the sequence
            guards="prefill_was_split",
        ),
        RequiredSetting(
            key="long_prefill_token_threshold",
            readback="rollout.long_prefill_threshold",
            channel=_ARGUMENT,
            value=0,
            guards="prefill_was_split",
        ),
        RequiredSetting(
            key="enforce_eager",
            readback="engine.compiled",
            channel=_ARGUMENT,
            value=False,
            guards="patch_never_ran",
        ),
        RequiredSetting(
            key="the all-reduce",
            readback="parallel.tensor.backend",
            channel=_ARGUMENT,
            guards="collective_unpinned",
        ),
        *(
            RequiredSetting(
                key=name,
                readback=f"environment.{name}",
                channel=_VARIABLE,
                only_where=_NCCL,
                guards="collective_unpinned",
            )
            for name in ("NCCL_ALGO", "NCCL_PROTO")
        ),
    )
