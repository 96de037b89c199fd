"""Protocols at the edge of the data plane."""
