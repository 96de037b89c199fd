"""Helpers for tests of Headrace and of what is built on it."""
