"""Runtime: a region as a differentiable function, launched on one device or shared by several."""
