"""Block-diagonal attention: every token attends within its own block of its own sequence."""
