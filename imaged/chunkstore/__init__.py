"""The store of chunks on a local disk: packs, their index, names; its locks, its check and its repair."""
