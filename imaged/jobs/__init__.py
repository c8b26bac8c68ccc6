"""What a server does for its clients in processes of their own."""
