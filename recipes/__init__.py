"""Hydra config groups, on other applications' search path as ``pkg://ep_plugin.recipes``.

Hydra imports this package when it looks for the groups, which registers the structured configs that they name.
"""

from ep_plugin.train.settings import register

register()
