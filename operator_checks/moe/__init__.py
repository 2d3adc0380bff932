"""Checks of mixtures of experts: the choice of experts and what they compute. Declared; nothing runs yet."""
