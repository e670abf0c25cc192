"""What all packages need, and no user sees."""
