"""Schedules over the steps of a loop: what to keep, what to run again, and running that."""
