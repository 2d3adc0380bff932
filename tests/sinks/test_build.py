from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from mismatch_hooks.sinks import build
from mismatch_hooks.sinks.base import SinkError
from mismatch_hooks.sinks.build import build_sinks


def test_sinks_come_in_the_order_given_and_touch_nothing(tmp_path: Path) -> None:
    sinks = build_sinks(["console", "jsonl", "wandb"], run_dir=tmp_path / "run")
    assert [sink.name for sink in sinks] == ["console", "jsonl", "wandb"]
    assert not (tmp_path / "run").exists()


def test_an_unknown_name_is_refused_with_the_known_ones_and_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(SinkError) as refused:
        build_sinks(["wadnb"], run_dir=tmp_path)
    assert str(refused.value) == (
        "mismatch_hooks.sinks: got 'wadnb'; accepts wandb, jsonl, console. Did you mean 'wandb'?"
    )


def test_a_name_given_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SinkError, match="got 'jsonl' more than once"):
        build_sinks(["jsonl", "jsonl"], run_dir=tmp_path)


def test_wandb_that_is_not_installed_is_refused_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(build, "version", absent)
    with pytest.raises(SinkError, match=r"install mismatch-hooks\[wandb\] or drop it from sinks"):
        build_sinks(["wandb"], run_dir=tmp_path)
