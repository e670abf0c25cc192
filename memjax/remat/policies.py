CONV_OUTPUT = "conv_output"
DENSE_FEATURES = "dense_features"
