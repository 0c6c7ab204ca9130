"""The planner: terms by hand, published runs, and the search against all layouts."""
