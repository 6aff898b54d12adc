"""Tests of several GPUs that need TransformerEngine."""
