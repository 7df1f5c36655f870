"""Launch plans: how any kernel is described, compiled and inspected."""
