"""The site is built, and the pages name what the trainers have."""
