"""How each operation divides over the devices of a mesh, one module an operation."""
