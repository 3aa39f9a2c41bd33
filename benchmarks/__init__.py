"""Measurements; each prints a table and writes its raw results. None is a test."""
