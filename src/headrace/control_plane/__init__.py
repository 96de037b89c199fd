"""Desired state: finds models and publishes snapshots."""
