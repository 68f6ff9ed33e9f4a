"""Who is connected, and how much each client may use."""
