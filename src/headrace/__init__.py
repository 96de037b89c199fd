"""Headrace runs a trained model in production: server, scheduler, records and metrics in one install."""

__version__ = "0.1.0"
