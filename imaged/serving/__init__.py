"""The chunk server: routes, fast path, access, limits, metrics, processes."""
