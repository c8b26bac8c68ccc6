"""Staged host processes: namespaces over a lazily mounted image, with retained edits."""
