"""Division of the registered operators over the devices of a DTensor's mesh."""
