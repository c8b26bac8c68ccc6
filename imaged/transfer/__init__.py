"""Whole images and snapshots between this host and servers."""
