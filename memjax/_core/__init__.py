"""What all packages need. Nothing here is public."""
