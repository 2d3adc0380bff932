"""An operator that multiplies by a number."""
