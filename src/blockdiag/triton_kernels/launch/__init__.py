"""Launch plans: the description, compilation and inspection of any kernel."""
