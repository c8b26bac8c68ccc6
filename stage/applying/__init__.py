"""Moving what a stage changed into the host directory, all or nothing."""
