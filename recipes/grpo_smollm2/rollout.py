"""The rollout side: a vLLM engine that samples with seeds of its own and takes new weights after every step."""

import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from recipes.grpo_smollm2.config import Config
from recipes.grpo_smollm2.cpu_bf16 import has_bf16_products, keep_fp32_copies

# What a launcher leaves behind for the trainer's rank; an engine core in its own process would join that group.
_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Rollout:
    """The policy that samples.

    Attributes:
        llm: the engine.
        weight_version: the trainer's label of the weights that were delivered last; "0" is what both load at start.
    """

    def __init__(
        self, folder: Path, config: Config, *, worker_extension: str | None, logits_processors: Sequence[str] = ()
    ) -> None:
        """Start the engine.

        Args:
            folder: the model.
            config: the run.
            worker_extension: dotted name of a class whose methods the engine's workers gain.
            logits_processors: names of classes, ``module:class``, that the engine's sampler gains.
        """
        self._config = config
        self._in_process = config.rollout.engine_core_in_process
        self.weight_version = "0"
        _set_environment(in_process=self._in_process)
        from vllm import LLM

        if self._in_process and config.model.dtype == "bfloat16" and not has_bf16_products():
            keep_fp32_copies()
        sequences = config.task.prompts * config.task.samples
        with _without(_LAUNCHER):
            self.llm = LLM(
                str(folder),
                skip_tokenizer_init=True,
                dtype=config.model.dtype,
                seed=config.seed,
                enforce_eager=True,
                max_model_len=config.rollout.max_model_len,
                max_num_seqs=sequences,
                # Every prompt fits into one pass: a prompt cut in two would rewind its request's generator, and one
                # on a CPU cannot be rewound (vLLM 0.32: "CPU Generator does not use offset").
                max_num_batched_tokens=max(2048, sequences * config.rollout.max_model_len),
                # A pass that the scheduler may cut differs from itself: another cut, other bits.
                enable_chunked_prefill=False,
                enable_prefix_caching=config.rollout.prefix_caching,
                kv_cache_memory_bytes=config.rollout.kv_cache_mib * 2**20,
                # What the model's file recommends for chat is not what GRPO samples with.
                generation_config="vllm",
                logprobs_mode="raw_logprobs",
                disable_log_stats=True,
                use_tqdm_on_load=False,
                worker_extension_cls=worker_extension or "",
                logits_processors=list(logits_processors),
            )

    def sampling_params(self, *, step: int, stop_token_ids: Sequence[int]) -> list[Any]:
        """vLLM's sampling parameters of one step's sequences, one each; every sequence of a run has its own seed."""
        from vllm import SamplingParams

        sampling, task = self._config.sampling, self._config.task
        sequences = task.prompts * task.samples
        return [
            SamplingParams(
                max_tokens=task.max_response_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                min_p=sampling.min_p,
                seed=(self._config.seed * 1_000_003 + step * sequences + index) % 2**63,
                stop_token_ids=list(stop_token_ids),
                logprobs=0,
                detokenize=False,
            )
            for index in range(sequences)
        ]

    def sample(self, prompts: Sequence[Sequence[int]], params: Sequence[Any]) -> list[Any]:
        """One response to each prompt, as vLLM's own outputs, in order."""
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs: list[Any] = self.llm.generate(inputs, list(params), use_tqdm=False)
        return outputs

    def sync(self, named_tensors: Iterable[tuple[str, Tensor]], *, weight_version: str) -> None:
        """Deliver weights under Hugging Face's names, and forget everything that was computed with the old ones."""
        named_tensors = _with_head(named_tensors)
        if self._in_process:
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(named_tensors)})
        else:
            from safetensors.torch import save_file

            # Through a file: tensors do not travel to another process as plain data. Copied, because a tied head and
            # its embedding are one tensor, and safetensors refuses to write that twice.
            with tempfile.TemporaryDirectory(prefix="weights-") as folder:
                tensors = {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in named_tensors}
                save_file(tensors, Path(folder) / "model.safetensors", metadata={"format": "pt"})
                self.llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
        # A reload leaves cached prefixes in place; they were computed with the old weights.
        self.llm.reset_prefix_cache()
        self.weight_version = weight_version

    def close(self) -> None:
        """Stop the engine, and its process where it has one."""
        self.llm.llm_engine.engine_core.shutdown()


def _with_head(named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Add the head of a model that ties it to the embedding.

    vLLM's CPU build multiplies with a packed copy of the head, which it packs anew only when ``lm_head.weight`` is
    delivered by that name (0.32); without it the engine samples with its first head for good.
    """
    embedding, has_head = None, False
    for name, tensor in named_tensors:
        embedding = tensor if name == "model.embed_tokens.weight" else embedding
        has_head |= name == "lm_head.weight"
        yield name, tensor
    if embedding is not None and not has_head:
        yield "lm_head.weight", embedding


def _set_environment(*, in_process: bool) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if in_process else "1"
    for name, value in {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # ERROR: vLLM's advice about preloaded libraries and its own defaults would drown the line a step.
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    }.items():
        os.environ.setdefault(name, value)


@contextmanager
def _without(names: Iterable[str]) -> Iterator[None]:
    held = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(held)
