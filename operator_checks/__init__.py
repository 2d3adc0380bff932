"""The operators that can be checked, one folder each; ``mismatch_hooks.live`` finds them by entry point."""

if __name__ == "operator_checks":
    raise ImportError("import mismatch_hooks.operator_checks, not operator_checks: one file must not be two modules")
