"""What the live engine really multiplies with, under Hugging Face names.

The CPU build packs linear weights and empties the parameter; a head that kept its parameter multiplies with a packed
copy all the same. So a weight is what comes out of the live module for identity rows: 1·w plus zeros, which is exact
in every dtype that the engine computes in, except that −0.0 comes back as +0.0 (so all digests are taken of w + 0).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mismatch_hooks.integrations.vllm.rotary import implied_inverse_frequencies

INVERSE_FREQUENCIES = "model.rotary_emb.inv_freq"


def digest(tensor: Tensor) -> str:
    """Return the BLAKE3 of the tensor's bytes in its own dtype, row-major, −0.0 taken as +0.0."""
    from blake3 import blake3

    plain = (tensor.detach() + 0).cpu().contiguous().flatten().view(torch.uint8)
    return str(blake3(plain.numpy()).hexdigest())  # type: ignore[arg-type]


def weight_digests(model: Any, prefixes: Sequence[str] | None) -> dict[str, str]:
    """Return Hugging Face tensor name to digest of every live weight whose name starts with one of ``prefixes``.

    A tied head is left out when it multiplies with exactly the embedding, and listed as ``lm_head.weight`` when it
    does not. A tensor that is cut over ranks is ``"unobservable: …"``.
    """
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        parts = _parts(name, module, getattr(model, "packed_modules_mapping", {}))
        wanted = [part for part in parts if prefixes is None or part.startswith(tuple(prefixes))]
        if wanted:
            read = dict(_tensors(model, module, parts))
            found.update({part: _digest_or_reason(read[part]) for part in wanted if part in read})
    if _is_tied(model) and found.get("lm_head.weight") == digest(_embedding_rows(model.model.embed_tokens)):
        del found["lm_head.weight"]
    return found


def derived_digests(model: Any, prefixes: Sequence[str] | None) -> dict[str, str]:
    """Return the digest of the fp32 inverse frequencies that the live rotary table implies."""
    if prefixes is not None and not INVERSE_FREQUENCIES.startswith(tuple(prefixes)):
        return {}
    tables = {id(module): module for module in model.modules() if hasattr(module, "cos_sin_cache")}
    if len(tables) != 1:
        return {INVERSE_FREQUENCIES: f"unobservable: {len(tables)} rotary tables in the model; one is comparable"}
    implied = implied_inverse_frequencies(next(iter(tables.values())))
    if not implied.exact:
        return {INVERSE_FREQUENCIES: f"unobservable: {implied.why}"}
    return {INVERSE_FREQUENCIES: digest(implied.frequencies)}


def _digest_or_reason(tensor: Tensor | str) -> str:
    return tensor if isinstance(tensor, str) else digest(tensor)


def _parts(name: str, module: Any, packed: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Hugging Face names of the tensors of one module, each with its rows (0: all of them)."""
    path, _, last = name.rpartition(".")
    if getattr(module, "quant_method", None) is None or not hasattr(module, "params_dtype"):
        weight = module._parameters.get("weight")
        return {f"{name}.weight": 0} if weight is not None and not list(module.children()) else {}
    fields = ["weight"] + ["bias"] * (module._parameters.get("bias") is not None)
    if last not in packed:
        return {f"{name}.{field}": 0 for field in fields}
    return {
        f"{path}.{part}.{field}": rows
        for field in fields
        for part, rows in zip(packed[last], module.output_partition_sizes, strict=True)
    }


def _tensors(model: Any, module: Any, parts: Mapping[str, int]) -> Iterator[tuple[str, Tensor | str]]:
    ranks = getattr(module, "tp_size", 1)
    if ranks > 1:
        yield from ((part, f"unobservable: sharded over {ranks} ranks") for part in parts)
        return
    whole: dict[str, Tensor] = {}
    start = {"weight": 0, "bias": 0}
    for part, rows in parts.items():
        field = part.rpartition(".")[2]
        if field not in whole:
            whole[field] = _effective(model, module, field)
        stop = start[field] + rows if rows else whole[field].shape[0]
        yield part, whole[field][start[field] : stop]
        start[field] = stop


def _effective(model: Any, module: Any, field: str) -> Tensor:
    if field == "bias":  # one packed kernel widens the bias in place
        bias: Tensor = module.bias.to(module.params_dtype)
        return bias
    if module is getattr(getattr(model, "model", None), "embed_tokens", None):
        return _embedding_rows(module)
    weight: Tensor = module.weight
    if hasattr(module, "org_vocab_size"):
        return (weight if _head_is_cast(model, weight) else _through_identity(module))[: module.org_vocab_size]
    if not hasattr(module, "quant_method"):
        return weight
    plain = not hasattr(module, "cpu_linear") and weight.dtype == module.params_dtype
    return weight if plain and weight.ndim == 2 else _through_identity(module)


def _embedding_rows(module: Any) -> Tensor:
    rows: Tensor = module.weight[: module.org_vocab_size]
    return rows


def _head_is_cast(model: Any, weight: Tensor) -> bool:
    # With a head dtype of its own the engine casts the parameter and never calls the packed copy.
    head_dtype = getattr(getattr(model, "logits_processor", None), "head_dtype", None)
    return head_dtype is not None and head_dtype != weight.dtype


def _through_identity(module: Any) -> Tensor:
    inputs = getattr(module, "input_size_per_partition", None) or module.input_size
    identity = torch.eye(inputs, dtype=module.params_dtype, device=_device(module))
    method = module.quant_method
    with torch.inference_mode():
        # The class's function, so that a reference bound on this object is not what answers.
        rows: Tensor = type(method).apply(method, module, identity, None)
    return rows.t()


def _device(module: Any) -> torch.device:
    return next((parameter.device for parameter in module.parameters()), torch.device("cpu"))


def _is_tied(model: Any) -> bool:
    head, embedding = getattr(model, "lm_head", None), getattr(getattr(model, "model", None), "embed_tokens", None)
    if head is None or embedding is None or not hasattr(head, "weight") or not hasattr(embedding, "weight"):
        return False
    return bool(head is embedding or head.weight.data_ptr() == embedding.weight.data_ptr())
