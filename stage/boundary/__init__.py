"""The process of a stage: namespaces, mounts, privileges, and the caller's side of it."""
