"""The derivatives in a traced step: found, and run otherwise."""
