"""Benchmarks: ``ep-bench`` (``python -m ep_plugin.bench``)."""
