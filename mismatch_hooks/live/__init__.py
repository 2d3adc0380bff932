"""What sits in the loop: configuration, the hooks object, capture, cadence and budget, alerts, isolation.

May import pipeline, sinks and below. Engines and operator checks reach it, never the other way round.
"""
