"""Training: tasks to learn."""
