"""Frozen records, enums, freezing and fingerprints: the words of the design. Imports the standard library only."""
