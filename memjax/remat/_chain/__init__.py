"""`chain`: unequal blocks within a memory budget."""
