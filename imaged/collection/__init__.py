"""What may be removed from a store, and when: leases, collections beside everything else, the bound of a cache."""
