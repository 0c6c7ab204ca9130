"""What a process of a job is and does: its environment, children, threads and end."""
