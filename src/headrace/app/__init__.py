"""Composition roots: the only modules that know both planes."""
