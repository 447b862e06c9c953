"""Measurements of speed, one per module; `launch/benchmark.py` picks among them."""
