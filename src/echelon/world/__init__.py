"""What a rank is, and how ranks reach one another."""
