"""Stages on disk, what runs in them, and their limits."""
