"""Settings that hold for every test."""

from hypothesis import settings

# A shared two-core host misses any deadline now and then, and a run must be repeatable.
settings.register_profile("repeatable", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("repeatable")
