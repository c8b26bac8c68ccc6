"""Chunk store, block images, OCI conversion and the chunk server."""
