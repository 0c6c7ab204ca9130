"""What each rank is doing, who waits for whom, and which failure was the first."""
