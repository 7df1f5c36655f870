"""Several devices beside one."""
