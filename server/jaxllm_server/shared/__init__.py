"""Code shared by both protocols."""
