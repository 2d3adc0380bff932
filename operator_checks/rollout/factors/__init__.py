"""Declarations; the file is named after the last segment of the factor's id."""
