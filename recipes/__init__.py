"""Runnable training loops; each folder is one recipe, read from its ``train.py``."""
