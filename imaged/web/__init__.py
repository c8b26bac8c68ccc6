"""The web page of a server: what its store holds, its jobs and its health, as HTML that works without a script."""
