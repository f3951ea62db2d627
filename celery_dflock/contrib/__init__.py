"""Integrations that only some projects use. Nothing here is imported by the rest."""
