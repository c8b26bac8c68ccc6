"""Trajectory prefixes of agent formats."""
