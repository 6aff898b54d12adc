"""Hydra config groups, on other applications' search path as ``pkg://ep_plugin.recipes``."""
