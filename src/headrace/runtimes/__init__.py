"""Adapters that execute models; see `headrace.ports.Runtime`."""
