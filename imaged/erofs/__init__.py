"""Writes EROFS, the kernel's read-only file system: metadata in one image, file data on a second device."""
