"""Block images as files over FUSE, EROFS mounts of them, and the node daemon that serves them."""
