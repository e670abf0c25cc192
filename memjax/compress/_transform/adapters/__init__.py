"""What `compressed` can be applied to: functions, and modules of Linen and NNX."""
