"""Put the outer folders into the wheel as subpackages of ``mismatch_hooks``; everything else is in pyproject.toml.

A checkout that lost the two links in ``mismatch_hooks/`` builds the same wheel.
"""

from setuptools import find_packages, setup

INSIDE = ("integrations", "operator_checks")
packages = set(find_packages(include=["mismatch_hooks", "mismatch_hooks.*"]))
packages |= {f"mismatch_hooks.{name}" for top in INSIDE for name in find_packages(include=[top, f"{top}.*"])}
setup(packages=sorted(packages), package_dir={f"mismatch_hooks.{top}": top for top in INSIDE})
