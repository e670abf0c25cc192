"""What would remove an array that is kept."""
