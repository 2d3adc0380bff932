"""What the loop refuses before anything has started."""

from importlib.util import find_spec

import pytest

from recipes.grpo_smollm2 import train
from recipes.grpo_smollm2.errors import RecipeError


@pytest.mark.parametrize("absent", ["megatron.core", "vllm"])
def test_an_absent_engine_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch, absent: str) -> None:
    finds = "recipes.grpo_smollm2.train.find_spec"
    monkeypatch.setattr(finds, lambda name: None if name == absent else find_spec(name))
    extra = absent.partition(".")[0]
    with pytest.raises(RecipeError, match=rf"^{absent} is not installed.*mismatch-hooks\[{extra}\]\.$"):
        train.require_engines()
