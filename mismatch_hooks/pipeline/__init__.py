"""The steps of an ablation as free functions over records: discover, plan, bind, score, verify, diagnose, report.

May import references, model_meta and schema; knows no engine, clock, file, global or logger.
"""
