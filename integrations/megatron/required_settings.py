"""What has to be pinned on a megatron-core trainer for bits to mean something, each with where it is read back."""

from mismatch_hooks.schema.enums import SettingChannel
from mismatch_hooks.schema.environment import RequiredSetting

_FIELD, _VARIABLE = SettingChannel.CONFIG_FIELD, SettingChannel.ENVIRONMENT_VARIABLE
_CUDA, _NCCL = {"engine.device": "cuda"}, {"parallel.tensor.backend": "nccl"}
_TRANSFORMER_ENGINE = {"training.attention_backend": "TE"}


def required_settings() -> tuple[RequiredSetting, ...]:
    """Return the settings, in the order of the README; that scoring wrote no weight is watched by digest."""
    return (
        RequiredSetting(key="attention_backend", readback="training.attention_backend", channel=_FIELD),
        RequiredSetting(
            key="NVTE_ALLOW_NONDETERMINISTIC_ALGO",
            readback="environment.NVTE_ALLOW_NONDETERMINISTIC_ALGO",
            channel=_VARIABLE,
            value="0",
            only_where=_TRANSFORMER_ENGINE,
        ),
        RequiredSetting(
            key="CUBLAS_WORKSPACE_CONFIG",
            readback="environment.CUBLAS_WORKSPACE_CONFIG",
            channel=_VARIABLE,
            value=":4096:8",
            only_where=_CUDA,
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
        RequiredSetting(
            key="torch.backends.cuda.matmul.fp32_precision",
            readback="training.matmul.tf32",
            channel=_FIELD,
            value=False,
            only_where=_CUDA,
        ),
        RequiredSetting(
            key="torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
            readback="training.matmul.reduced_precision_reduction",
            channel=_FIELD,
            value=False,
            only_where=_CUDA,
        ),
        RequiredSetting(
            key="torch.use_deterministic_algorithms",
            readback="training.deterministic_algorithms",
            channel=_FIELD,
            value=True,
            only_where=_CUDA,
        ),
        RequiredSetting(
            key="attention_dropout",
            readback="training.dropout.attention",
            channel=_FIELD,
            value=0.0,
            guards="dropout_active",
        ),
        RequiredSetting(
            key="hidden_dropout",
            readback="training.dropout.hidden",
            channel=_FIELD,
            value=0.0,
            guards="dropout_active",
        ),
        RequiredSetting(key="sequence_parallel", readback="parallel.sequence", channel=_FIELD, value=False),
        RequiredSetting(key="the head's dtype", readback="model.head.dtype", channel=_FIELD),
    )
