"""The `pvisor` command: one thin module per command group, no logic."""
