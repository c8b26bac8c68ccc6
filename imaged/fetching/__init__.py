"""Chunks and records from servers: requests, batches, tiers of servers, what is on its way, what is stored after."""
