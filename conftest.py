"""Fixtures and order of all tests, those of the operator checks included."""

pytest_plugins = ("tests.tiny_engines", "tests.workers")
