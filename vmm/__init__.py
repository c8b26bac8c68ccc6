"""Virtual machine guests, parked as snapshots in the chunk store."""
