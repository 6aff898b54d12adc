"""Tests; a package so that worker processes import test functions by one name."""
