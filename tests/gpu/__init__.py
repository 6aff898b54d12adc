"""Tests that need GPUs; see conftest."""
