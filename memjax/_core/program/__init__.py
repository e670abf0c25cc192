"""What a program (a jaxpr) consists of, what its equations cost, and how to run it."""
